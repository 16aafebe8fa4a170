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
BF16 = jnp.bfloat16


def integers(shape, seed=0):
    """From -3 to 3; times 1.25 or the like, most of them would be no numbers of E5M2."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def with_integers(tree):
    leaves, structure = jax.tree.flatten(tree)
    drawn = [integers(leaf.shape, i).astype(leaf.dtype) for i, leaf in enumerate(leaves, start=1)]
    return structure.unflatten(drawn)


def linen(name, args, options, x):
    """The initial parameters of jfp8's layer and of Flax's, and both as functions of theirs."""
    layers = (
        getattr(jfp8, name)(*args, **options, recipe=Unscaled()),
        getattr(nn, name)(*args, **options),
    )
    initial = jax.jit(lambda: [layer.init(KEY, x)["params"] for layer in layers])()
    return initial, [lambda p, x, layer=layer: layer.apply({"params": p}, x) for layer in layers]


def of_nnx(name, args, options, x):
    layers = (
        getattr(jfp8.nnx, name)(*args, **options, recipe=Unscaled(), rngs=nnx.Rngs(0)),
        getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0)),
    )
    parts = [nnx.split(layer, nnx.Param, ...) for layer in layers]
    functions = [
        lambda p, x, graph=graph, rest=rest: nnx.merge(graph, nnx.State(p), rest, copy=True)(x)
        for graph, _, rest in parts
    ]
    return [nnx.to_pure_dict(params) for _, params, _ in parts], functions


# Where the layer comes from, its name, arguments, keyword arguments, and the shape of the input.
CASES = [
    (linen, "Dense", (5,), {}, (2, 3, 4)),
    (linen, "DenseGeneral", ((2, 7),), {"batch_dims": (0,), "axis": (-1, 1)}, (3, 2, 4)),
    (linen, "Einsum", ((5, 6, 7), "abc,cde->abde"), {}, (3, 4, 5)),
    (linen, "Einsum", ((3, 5, 6), "bgi,gij->jbg"), {}, (4, 3, 5)),
    (
        *(linen, "Conv", (6, (3, 2))),
        {"strides": (2, 1), "kernel_dilation": 2, "feature_group_count": 2, "padding": "VALID"},
        (2, 7, 6, 4),
    ),
    (linen, "Conv", (6, 3), {"padding": "CIRCULAR"}, (2, 5, 4)),
    (
        *(linen, "ConvTranspose", (5, (3, 2))),
        {"strides": (2, 1), "transpose_kernel": True},
        (2, 3, 4, 4),
    ),
    (of_nnx, "Linear", (4, 5), {}, (2, 3, 4)),
    (of_nnx, "LinearGeneral", ((2, 4), (3, 2)), {"axis": (1, -1)}, (3, 2, 4)),
    (
        *(of_nnx, "Conv", (4, 6, 3)),
        {"strides": 2, "feature_group_count": 2, "padding": "CAUSAL"},
        (2, 7, 4),
    ),
    (
        *(of_nnx, "ConvTranspose", (4, 5, (3, 2))),
        {"strides": 2, "padding": "CIRCULAR"},
        (2, 3, 2, 4),
    ),
    (of_nnx, "Einsum", ("nta,hab->nthb", (3, 4, 5), (3, 5)), {}, (2, 6, 4)),
]
RARE = [
    (linen, "Dense", (8,), {"use_bias": False, "dtype": BF16}, (16,)),
    (linen, "Dense", (8,), {"param_dtype": BF16, "dtype": BF16, "precision": "highest"}, (4, 16)),
    (linen, "Dense", (8,), {"param_dtype": jnp.float16, "dtype": jnp.float32}, (4, 16)),
    (linen, "DenseGeneral", ((2, 3),), {"axis": (1, 3), "dtype": BF16}, (2, 3, 4, 5)),
    (linen, "Einsum", ((5, 6), "...c,cd->d..."), {}, (2, 3, 5)),
    (linen, "Einsum", ((3, 5, 6), " g b i , g i j -> g b j "), {}, (3, 4, 5)),
    (linen, "Einsum", ((6, 7), "ab,cd->abcd"), {"use_bias": False}, (4, 5)),
    (of_nnx, "LinearGeneral", (4, 5), {"batch_axis": {0: 3}, "use_bias": False}, (3, 6, 4)),
    (of_nnx, "Conv", (4, 6, (3, 3)), {"kernel_dilation": 2, "padding": 2}, (2, 7, 7, 4)),
    (of_nnx, "Einsum", ("...a,ab->...b", (4, 5)), {}, (2, 3, 4)),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in RARE)],
    ids=lambda case: f"{case[0].__name__} {case[1]}{case[2]}",
)
def test_layers_are_those_of_flax(case):
    """Initial parameters, and at others the result and all gradients."""
    made, name, args, options, shape = case
    x = integers(shape)
    initial, functions = made(name, args, options, x)
    assert_same(*initial)
    params = with_integers(initial[1])

    @jax.jit
    def run(params, x):
        def both(f):
            y, vjp = jax.vjp(f, params, x)
            return y, vjp(integers(y.shape, 9).astype(y.dtype))

        return [both(f) for f in functions]

    found, expected = run(params, x)
    assert_same(found, expected)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(expected))
