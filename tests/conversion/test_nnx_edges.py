"""Which layers of an NNX model stay in high precision, however the model was made."""

import pytest
from flax import nnx

import jfp8
from jfp8.nnx import layers_of

D = 16


class Transformer(nnx.Module):
    """Whose attributes are in another order by name; the head is not the last in that."""

    def __init__(self, rngs):
        self.proj_in = nnx.Linear(5, D, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)
        self.head = nnx.Linear(D, 10, rngs=rngs)


class HeadFirst(nnx.Module):
    def __init__(self, rngs):
        self.vocabulary = nnx.Linear(D, 500, use_bias=False, rngs=rngs)
        self.embed = nnx.Embed(500, D, rngs=rngs)
        self.up = nnx.LinearGeneral(D, (2, D), rngs=rngs)
        self.zip = nnx.Linear(2 * D, D, rngs=rngs)


class EinsumHead(nnx.Module):
    """As Qwen3 in bonsai has it."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(D, D, rngs=rngs)
        self.lm_head = nnx.Einsum("BTD,DV->BTV", (D, 500), rngs=rngs)
        self.gate = nnx.Linear(D, D, rngs=rngs)


class OneWidth(nnx.Module):
    """Only the order of definition tells."""

    def __init__(self, rngs):
        self.z = nnx.Linear(D, D, rngs=rngs)
        self.grow(rngs)

    def grow(self, rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)


class Wider(OneWidth):
    """What a class inherits comes first."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.m = nnx.Linear(D, D, rngs=rngs)


class Block(nnx.Module):
    """Of a fused projection, too, no layer reads all features at once."""

    def __init__(self, rngs):
        self.qkv = nnx.Linear(D, 3 * D, rngs=rngs)
        self.out = nnx.Linear(D, D, rngs=rngs)


class ActorCritic(nnx.Module):
    """Two heads, called like neither: no layer reads what they make."""

    def __init__(self, rngs):
        self.torso = nnx.Linear(D, 4 * D, rngs=rngs)
        self.pi = nnx.Linear(4 * D, 6, rngs=rngs)
        self.v = nnx.Linear(4 * D, 1, rngs=rngs)


class HeadInFP8(nnx.Module):
    """No other layer is taken for it."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(D, D, rngs=rngs)
        self.head = jfp8.nnx.Linear(D, 500, recipe="current", rngs=rngs)


class Images(nnx.Module):
    """Of four channels, the most that an image has; and what is no image."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(4, D, 3, rngs=rngs)
        self.waves = nnx.Conv(5, D, 3, rngs=rngs)
        self.body = nnx.Conv(D, D, 3, rngs=rngs)
        self.fc = nnx.Linear(D, 10, rngs=rngs)


class Wrapper(nnx.Module):
    """Which holds no layer itself."""

    def __init__(self, rngs):
        self.model = Transformer(rngs)
        self.blocks = nnx.List([Block(rngs)])


def sequence(rngs):
    return nnx.Sequential(nnx.Linear(D, 500, rngs=rngs), nnx.relu, nnx.Linear(500, D, rngs=rngs))


STAY = {
    Transformer: ["head"],
    HeadFirst: ["vocabulary"],
    EinsumHead: ["lm_head"],
    OneWidth: ["a"],
    Wider: ["m"],
    Block: ["out"],
    HeadInFP8: [],
    Images: ["fc", "stem"],
    Wrapper: ["model/head"],
    sequence: ["layers/2"],
}

WAYS = {
    "directly": lambda make: make(nnx.Rngs(0)),
    "clone": lambda make: nnx.clone(make(nnx.Rngs(0))),
    "merge": lambda make: nnx.merge(*nnx.split(make(nnx.Rngs(0)))),
    "jit": lambda make: nnx.jit(make)(nnx.Rngs(0)),
    "abstract": lambda make: nnx.eval_shape(lambda: make(nnx.Rngs(0))),
}


def left_alone(model, **choice):
    """The layers that `convert` leaves as they are."""
    return sorted(path for path, _ in layers_of(jfp8.convert(model, "current", **choice)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", STAY, ids=lambda make: make.__name__)
def test_the_same_layers_stay_however_a_model_was_made(make, way):
    model = WAYS[way](make)
    assert left_alone(model) == STAY[make]
    if make is Transformer:  # listed in the order of definition
        assert [path for path, _ in layers_of(model)] == ["proj_in", "up", "down", "head"]


@pytest.mark.parametrize("way", WAYS)
def test_all_heads_stay_however_a_model_was_made(way):
    with pytest.warns(UserWarning, match="which layer of ActorCritic .*'pi', 'v'.*or all that do"):
        assert left_alone(WAYS[way](ActorCritic)) == ["pi", "v"]
    assert left_alone(WAYS[way](ActorCritic), exempt=("pi", "v")) == ["pi", "v"]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_does_not_tell_its_logits_is_told_what_to_type(way):
    """Its layers are all alike, and their names are not in the code of the class."""

    class Numbered(nnx.Module):
        def __init__(self, rngs):
            self.proj = nnx.Linear(3 * D, D, rngs=rngs)
            for name in ("late", "early"):
                setattr(self, name, nnx.Linear(D, D, rngs=rngs))

    model = WAYS[way](Numbered)
    with pytest.warns(UserWarning, match="cannot tell which layer of Numbered") as caught:
        assert left_alone(model) == ["early", "late", "proj"]
    (warning, _) = caught
    assert warning.filename == __file__
    (call,) = [text for text in str(warning.message).split("`") if text.startswith("jfp8.convert(")]
    assert "exempt=(jfp8.Edge.IMAGE_INPUT, 'late')" in call
    assert left_alone(model, exempt=(jfp8.Edge.IMAGE_INPUT, "late")) == ["late"]
    assert left_alone(model, exempt=()) == []
