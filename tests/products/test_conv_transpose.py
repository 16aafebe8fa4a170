"""Transposed convolutions: the rules of ``jax.lax.conv_transpose`` and of Flax, in FP8."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jfp8
from jfp8.products.conv_transpose import conv_transpose
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling

KEY = jax.random.key(0)
CURRENT = Float8CurrentScaling()

# lhs shape, window, strides, padding, dilation
CASES = {
    "same": ((2, 5, 4, 3), (3, 2), (2, 1), "SAME", (1, 1)),
    "valid": ((2, 5, 4, 3), (3, 2), (2, 3), "VALID", (1, 1)),
    "stride beyond window": ((2, 5, 4, 3), (2, 2), (3, 4), "SAME", (1, 1)),
    "dilated": ((2, 5, 4, 3), (3, 2), (2, 1), "SAME", (2, 3)),
    "pairs": ((2, 5, 4, 3), (3, 3), (2, 2), ((1, 2), (0, 1)), (1, 1)),
    "1-d": ((2, 6, 3), (4,), (2,), "SAME", (1,)),
    "3-d": ((1, 3, 2, 2, 3), (2, 1, 2), (2, 1, 1), "VALID", (1, 1, 1)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
kernels = pytest.mark.parametrize("transpose_kernel", [False, True], ids=["", "transpose_kernel"])


def integers(shape, seed=0) -> jax.Array:
    """Sums of products of small integers are exact in any order, and FP8 holds them."""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), jnp.float32)


@kernels
@cases
def test_it_is_jax_conv_transpose(case, transpose_kernel):
    lhs_shape, window, strides, padding, dilation = case
    channels = (4, 3) if transpose_kernel else (3, 4)
    lhs, rhs = integers(lhs_shape), integers((*window, *channels), 1)
    rank = len(window)
    numbers = (f"N{'DHW'[-rank:]}C", f"{'DHW'[-rank:]}IO", f"N{'DHW'[-rank:]}C")
    more = (strides, padding, dilation)
    ours = conv_transpose(lhs, rhs, *more, transpose_kernel, lax.conv_general_dilated)
    theirs = lax.conv_transpose(
        lhs, rhs, *more, dimension_numbers=numbers, transpose_kernel=transpose_kernel
    )
    np.testing.assert_array_equal(ours, theirs)
    assert np.any(ours)


def test_an_unknown_padding():
    with pytest.raises(ValueError, match="padding='SOME': a transposed convolution takes 'SAME'"):
        conv_transpose(
            *(integers((1, 4, 2)), integers((2, 2, 2)), (1,), "SOME", (1,), False),
            lax.conv_general_dilated,
        )


LAYERS = {
    "bf16": {"kernel_size": (3, 3), "dtype": jnp.bfloat16},
    "same": {"kernel_size": (3, 3), "strides": (2, 2)},
    "valid, no bias": {"kernel_size": (3, 2), "strides": 2, "padding": "VALID", "use_bias": False},
    "circular": {"kernel_size": (3, 3), "strides": (2, 2), "padding": "CIRCULAR"},
    "circular, transposed": {
        "kernel_size": (4, 3),
        "strides": (1, 2),
        "padding": "CIRCULAR",
        "transpose_kernel": True,
    },
    "dilated": {"kernel_size": (2, 2), "kernel_dilation": (2, 1), "padding": 1},
    "transposed": {"kernel_size": (3, 3), "transpose_kernel": True},
    "masked": {"kernel_size": (3, 3), "mask": np.tri(3)[:, :, None, None] * np.ones((1, 1, 3, 4))},
}


def both(arguments, recipe=CURRENT):
    return (nn.ConvTranspose(4, **arguments), jfp8.ConvTranspose(4, **arguments, recipe=recipe))


@pytest.mark.representative(3)
@pytest.mark.parametrize(
    ("name", "batch"), [(name, (2,)) for name in LAYERS] + [("same", ()), ("same", (2, 2))]
)
def test_layer_is_flax_where_fp8_holds_the_values(name, batch):
    """Same parameters; with integer operands and power-of-two amaxes, the same results."""
    stock, ours = both(LAYERS[name], DelayedScaling(scale_rounding="power_of_two"))
    x = integers((*batch, 5, 4, 3))

    @jax.jit
    def run(key, x):
        params, same = stock.init(key, x), ours.init(key, x)["params"]
        exact = {k: integers(p.shape, i) for i, (k, p) in enumerate(params["params"].items())}
        return params["params"], same, *(m.apply({"params": exact}, x) for m in (ours, stock))

    params, same, y, expected = run(KEY, x)
    assert jax.tree.structure(same) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))
    assert np.any(y)


def test_a_mask_of_another_shape():
    layer = jfp8.ConvTranspose(4, (3, 3), mask=np.ones((3, 3, 4, 3)))
    with pytest.raises(ValueError, match=r"mask must have the shape of the kernel, \(3, 3, 3, 4\)"):
        layer.init(KEY, jnp.ones((1, 4, 4, 3)))
