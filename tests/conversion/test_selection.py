"""Which layers of a model become FP8: patterns, types, edges, functions, and what is no choice."""

import flax.linen as nn
import pytest

import jfp8
from jfp8.conversion.selection import EDGES, Edge, Selection, select
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling

RECIPE = Float8CurrentScaling()
DENSE, CONV = nn.Dense(4), nn.Conv(4, (3,))


def decide(path="Encoder_0/Dense_1", layer=DENSE, edge=None, *, exempt=(), only=None):
    return select(RECIPE, exempt, only).decide(path, layer, edge)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("Dense_0", "Dense_0", True),
        ("Dense_0", "Dense_01", False),
        ("Dense_0", "Encoder_0/Dense_0", False),  # patterns begin at the top
        ("*/Dense_0", "Encoder_0/Dense_0", True),
        ("*Dense_0", "Encoder_0/Dense_0", True),
        ("Encoder_0", "Encoder_0/Block_3/Dense_0", True),  # a module stands for all inside of it
        ("Encoder_0/*", "Encoder_0/Block_3/Dense_0", True),
        ("*/Block_3", "Encoder_0/Block_3/Dense_0", True),
        ("Encoder_0", "Encoder_01/Dense_0", False),
        ("Dense_[02]", "Dense_2", True),
        ("Dense_[02]", "Dense_1", False),
        ("Dense_?", "Dense_1", True),
        ("dense_0", "Dense_0", False),
        ("*", "Dense_0", True),
    ],
)
def test_patterns(pattern, path, matches):
    assert (decide(path, exempt=pattern).recipe is None) == matches
    assert (decide(path, only=pattern).recipe is not None) == matches


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("Encoder_0/*", "exempt: 'Encoder_0/*'"),
        (nn.Dense, "exempt: Dense"),
        (Edge.LOGITS, "exempt: a layer whose result the model returns: the final logits"),
        (lambda path, layer: path.endswith("Dense_1") and layer is DENSE, "exempt: <lambda>"),
    ],
)
def test_each_kind_of_choice_and_its_reason(choice, reason):
    decision = decide(edge=Edge.LOGITS, exempt=choice)
    assert decision.recipe is None
    assert decision.reason == reason
    assert decide("Encoder_0/Dense_1", DENSE, Edge.LOGITS, only=choice).recipe == RECIPE
    other = decide("Decoder_0/Dense_2", CONV, Edge.IMAGE_INPUT, exempt=choice)
    assert other == jfp8.conversion.selection.Decision(RECIPE)
    refused = decide("Decoder_0/Dense_2", CONV, Edge.IMAGE_INPUT, only=choice)
    assert refused.recipe is None
    assert refused.reason == f"not among only={reason.removeprefix('exempt: ')}"


def test_subclasses_are_of_the_type():
    class MyDense(nn.Dense):
        pass

    assert decide(layer=MyDense(4), exempt=nn.Dense).recipe is None
    assert decide(layer=DENSE, exempt=MyDense).recipe is RECIPE


def test_exempt_goes_before_only():
    assert decide("a/Dense_0", only="a/*", exempt="*/Dense_0").reason == "exempt: '*/Dense_0'"
    assert decide("a/Dense_1", only="a/*", exempt="*/Dense_0").recipe == RECIPE


@pytest.mark.parametrize("edge", Edge)
def test_edges_are_exempt_by_default_but_not_where_only_names_layers(edge):
    assert tuple(Edge) == EDGES
    assert decide(edge=edge, exempt=None).recipe is None
    assert decide(edge=None, exempt=None).recipe == RECIPE
    assert decide(edge=edge, exempt=()).recipe == RECIPE
    assert decide(edge=edge, exempt=None, only="*").recipe == RECIPE
    assert decide(edge=edge, exempt="Decoder_0/*").recipe == RECIPE  # replaces the default
    assert decide(edge=edge, exempt=(*EDGES, "Decoder_0/*")).recipe is None
    other = next(e for e in Edge if e is not edge)
    assert decide(edge=edge, exempt=other).recipe == RECIPE


@pytest.mark.parametrize("several", [list, tuple])
def test_several_choices(several):
    chosen = select(RECIPE, several(["a", nn.Conv]), None)
    assert set(chosen.exempt) == {"a", nn.Conv}
    assert chosen.decide("a/x", DENSE, None).recipe is None
    assert chosen.decide("b", CONV, None).recipe is None
    assert chosen.decide("b", DENSE, None).recipe == RECIPE


def test_nothing_chosen_with_only():
    assert decide(only=()).reason == "not among only="


def test_a_selection_is_a_value():
    make = lambda: select(RECIPE, ["a", nn.Conv], "b", attention=True)
    assert make() == make() == Selection(RECIPE, ("a", nn.Conv), ("b",), True)
    assert hash(make()) == hash(make())
    assert make() != select(DelayedScaling(), ["a", nn.Conv], "b", attention=True)


@pytest.mark.parametrize("name", ["exempt", "only"])
@pytest.mark.parametrize("bad", [3, ["a", 3], None, {"a": 1}])
def test_what_is_no_choice(name, bad):
    if bad is None:
        bad = [None]
    words = rf"{name}=.*patterns of paths such as 'decoder/\*', types such as nn.Conv"
    with pytest.raises(TypeError, match=words):
        select(RECIPE, **{"exempt": (), "only": None, name: bad})


def test_a_recipe_is_needed():
    with pytest.raises(TypeError, match="a model, which comes first"):
        jfp8.convert("delayed", DENSE)
    with pytest.raises(TypeError, match="recipe"):
        select(DelayedScaling, None, None)
    assert select("delayed", None, None).recipe == DelayedScaling()


@pytest.mark.parametrize("name", ["exempt", "only"])
def test_a_pattern_that_matches_nothing(name):
    chosen = select(RECIPE, **{"exempt": (), "only": None, name: ["Dense_*", "encoder/*"]})
    chosen.check_patterns(["Dense_0", "encoder/Dense_0"])
    with pytest.raises(ValueError, match=r"'encoder/\*' matches no layer.*Layers: Dense_0, dec"):
        chosen.check_patterns(["decoder", "Dense_0"])
    with pytest.raises(ValueError, match=r"'Dense_\*' matches no layer.*Layers: none"):
        chosen.check_patterns([])


@pytest.mark.parametrize("name", ["exempt", "only"])
def test_a_type_that_no_layer_has(name):
    chosen = select(RECIPE, **{"exempt": (), "only": None, name: [nn.Conv]})
    chosen.check_types([DENSE, CONV])
    with pytest.raises(ValueError, match=r"no layer of type Conv.*It has: Dense\."):
        chosen.check_types([DENSE, DENSE])
    with pytest.raises(ValueError, match=r"no layer of type Conv.*It has: none\."):
        chosen.check_types(x for x in ())
