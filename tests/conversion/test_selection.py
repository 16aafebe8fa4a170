"""Which layers of a model become FP8: patterns, types, edges, functions, and what is no choice."""

import flax.linen as nn
import pytest

import jfp8
from jfp8.conversion.selection import EDGES, Edge, select
from jfp8.recipes.per_tensor import Float8CurrentScaling

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


def test_exempt_goes_before_only():
    assert decide("a/Dense_0", only="a/*", exempt="*/Dense_0").reason == "exempt: '*/Dense_0'"
    assert decide("a/Dense_1", only="a/*", exempt="*/Dense_0").recipe == RECIPE


@pytest.mark.parametrize("edge", Edge)
def test_edges_are_exempt_by_default_but_not_where_only_names_layers(edge):
    assert tuple(Edge) == EDGES
    assert decide(edge=edge, exempt=None).reason == f"exempt: {edge.value}"
    assert decide(edge=None, exempt=None).recipe == RECIPE
    assert decide(edge=edge, exempt=()).recipe == RECIPE
    assert decide(edge=edge, exempt=None, only="*").recipe == RECIPE
    assert decide(edge=edge, exempt="Decoder_0/*").recipe == RECIPE  # replaces the default
    assert decide(edge=edge, exempt=(*EDGES, "Decoder_0/*")).recipe is None
    other = next(e for e in Edge if e is not edge)
    assert decide(edge=edge, exempt=other).recipe == RECIPE
