"""Layers on small integers, whose products and sums FP8 and f32 hold exactly: bitwise Flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.recipes.unscaled import Unscaled
from support.arrays import assert_same

KEY = jax.random.key(0)
AS_IT_IS = Unscaled()


def integers(shape, seed=0):
    """From -3 to 3; times 1.25 or the like, most of them would be no numbers of E5M2."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def with_integers(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([integers(leaf.shape, i) for i, leaf in enumerate(leaves, start=1)])


# name, arguments, keyword arguments, shape of the input
LINEN = [
    ("Dense", (5,), {}, (2, 3, 4)),
    ("DenseGeneral", ((2, 7),), {"batch_dims": (0,), "axis": (-1, 1)}, (3, 2, 4)),
    ("Einsum", ((5, 6, 7), "abc,cde->abde"), {}, (3, 4, 5)),
    ("Einsum", ((3, 5, 6), "bgi,gij->jbg"), {}, (4, 3, 5)),
    (
        *("Conv", (6, (3, 2))),
        {"strides": (2, 1), "kernel_dilation": 2, "feature_group_count": 2, "padding": "VALID"},
        (2, 7, 6, 4),
    ),
    ("Conv", (6, 3), {"padding": "CIRCULAR"}, (2, 5, 4)),
    ("ConvTranspose", (5, (3, 2)), {"strides": (2, 1), "transpose_kernel": True}, (2, 3, 4, 4)),
]


@pytest.mark.parametrize("case", LINEN, ids=lambda case: f"{case[0]}{case[1]}")
def test_layers_of_linen(case):
    name, args, options, shape = case
    layers = (
        getattr(jfp8, name)(*args, **options, recipe=AS_IT_IS),
        getattr(nn, name)(*args, **options),
    )
    x = integers(shape)
    params = with_integers(jax.eval_shape(layers[1].init, KEY, x)["params"])

    @jax.jit
    def run(params, x):
        def both(layer):
            y, vjp = jax.vjp(lambda p, x: layer.apply({"params": p}, x), params, x)
            return y, vjp(integers(y.shape, 9))

        return [both(layer) for layer in layers]

    found, expected = run(params, x)
    assert_same(found, expected)
    assert all(map(np.any, jax.tree.leaves(expected)))


NNX = {
    "Linear": ((4, 5), {}, (2, 3, 4)),
    "LinearGeneral": (((2, 4), (3, 2)), {"axis": (1, -1)}, (3, 2, 4)),
    "Conv": ((4, 6, 3), {"strides": 2, "feature_group_count": 2, "padding": "CAUSAL"}, (2, 7, 4)),
    "ConvTranspose": ((4, 5, (3, 2)), {"strides": 2, "padding": "CIRCULAR"}, (2, 3, 2, 4)),
    "Einsum": (("nta,hab->nthb", (3, 4, 5), (3, 5)), {}, (2, 6, 4)),
}


@pytest.mark.parametrize("name", NNX)
def test_layers_of_nnx(name):
    """Forward: they differentiate as those of Linen do."""
    args, options, shape = NNX[name]
    ours = getattr(jfp8.nnx, name)(*args, **options, recipe=AS_IT_IS, rngs=nnx.Rngs(0))
    stock = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    params = with_integers(nnx.state(stock, nnx.Param))

    def with_params(layer, params):
        graph, _, rest = nnx.split(layer, nnx.Param, ...)
        return nnx.merge(graph, params, rest)

    @jax.jit
    def run(params, x):
        return [with_params(layer, params)(x) for layer in (ours, stock)]

    found, expected = run(params, integers(shape))
    assert_same(found, expected)
    assert np.any(expected)
