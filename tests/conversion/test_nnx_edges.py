"""Which matmuls of an NNX model stay in high precision, however the model was made."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfp8
from jfp8.nnx import Fp8State

D = 16
X = jax.random.normal(jax.random.key(0), (2, 6, D))


class MLP(nnx.Module):
    """A chain of layers, as most are written: numbers do not say which is the last."""

    def __init__(self, rngs, sizes=(D, 2 * D, D, 10)):
        pairs = zip(sizes, sizes[1:])
        self.layers = nnx.List([nnx.Linear(m, n, rngs=rngs) for m, n in pairs])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class HeadInFP8(nnx.Module):
    """No other layer is taken for it."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(D, D, rngs=rngs)
        self.head = jfp8.nnx.Linear(D, 500, recipe="current", rngs=rngs)

    def __call__(self, x):
        return self.head(self.mix(x))


STAY = {
    MLP: ["layers/2"],
    HeadFirst: ["a_vocabulary"],
    ActorCritic: ["pi", "v"],
    HeadInFP8: [],
    Images: ["fc", "stem"],
    Wrapper: ["model/a_vocabulary"],
    Adapted: ["", "linear/lora"],
}
WAYS = {
    "directly": lambda make: make(nnx.Rngs(0)),
    "clone": lambda make: nnx.clone(make(nnx.Rngs(0))),
    "merge": lambda make: nnx.merge(*nnx.split(make(nnx.Rngs(0)))),
    "abstract": lambda make: nnx.eval_shape(lambda: make(nnx.Rngs(0))),
}


def stayed(model):
    rows = jfp8.report(model, X).rows
    return sorted({row.path for row in rows if not row.fp8})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", STAY, ids=lambda make: make.__name__)
@pytest.mark.representative(3)
def test_the_same_layers_stay_however_a_model_was_made(make, way):
    assert stayed(jfp8.convert(WAYS[way](make), "current")) == STAY[make]


@pytest.mark.parametrize("make", [MLP, ActorCritic, Images])
def test_with_an_example_only_what_becomes_fp8_keeps_state(make):
    """Then the parts of the model stay the same, too, where they are called one by one."""
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    model = jfp8.convert(make(nnx.Rngs(0)), "delayed", shape)
    assert stayed(model) == STAY[make]
    keep = {path[:-3] for path, _ in nnx.to_flat_state(nnx.state(model, Fp8State))}
    held = {"/".join(map(str, path)) for path in keep}
    assert not held.intersection(STAY[make])
    assert len(held) == {MLP: 2, ActorCritic: 1, Images: 2}[make]
    name = STAY[make][0].partition("/")[0]
    part = model.layers[2] if make is MLP else getattr(model, name)
    x = X[..., : part.in_features]
    plain = make(nnx.Rngs(0))
    plain = plain.layers[2] if make is MLP else getattr(plain, name)
    assert jnp.array_equal(part(x), plain(x))


def test_a_part_that_is_called_alone_returns_no_logits():
    plain = MLP(nnx.Rngs(0))
    part = jfp8.convert(plain, "current").layers[0]
    assert not jnp.array_equal(part(X), plain.layers[0](X))
    alone = jfp8.convert(plain.layers[0], "current", exempt=())
    assert jnp.array_equal(alone(X), part(X))
