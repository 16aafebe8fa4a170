"""Convolutions in FP8 against convolutions of values that FP8 can hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jfp8
from jfp8 import recipes, scaled_conv_general_dilated
from support.arrays import relative_error
from support.fake_quantization import E4M3, E5M2, per_tensor
from support.models import gradients_of

NHWC = ("NHWC", "HWIO", "NHWC")

# lhs shape, rhs shape, strides, padding, further arguments of lax.conv_general_dilated.
CASES = {
    "dilated": ((2, 9, 8, 3), (3, 2, 3, 4), (1, 2), [(2, 1), (-1, 2)], {"rhs_dilation": (2, 3)}),
    "groups": ((2, 7, 6, 6), (3, 2, 3, 8), (2, 1), "SAME", {"feature_group_count": 2}),
    "3x3": ((2, 7, 6, 5), (3, 3, 5, 4), (1, 1), "SAME", {}),
    "1x1": ((2, 7, 6, 5), (1, 1, 5, 4), (1, 1), "SAME", {}),
    "1x1 with strides": ((2, 7, 6, 5), (1, 1, 5, 4), (2, 3), "VALID", {}),
    "depthwise": ((2, 7, 6, 6), (3, 3, 1, 12), (1, 1), "SAME", {"feature_group_count": 6}),
    "transposed": ((2, 5, 4, 3), (3, 3, 3, 4), (1, 1), [(1, 1), (2, 0)], {"lhs_dilation": (2, 3)}),
    "channels first": (
        (2, 5, 7, 6),
        (4, 5, 3, 3),
        (1, 1),
        "SAME",
        {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "1-d": ((2, 9, 3), (4, 3, 5), (2,), "SAME", {"dimension_numbers": ("NWC", "WIO", "NWC")}),
    "3-d": (
        (1, 4, 5, 3, 2),
        (2, 3, 1, 2, 3),
        (1, 1, 1),
        "SAME",
        {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")},
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def operands(case, seed=0):
    """f32 images, kernel and gradient, and the convolution in f32 with its arguments bound."""
    lhs_shape, rhs_shape, strides, padding, more = case
    more = {"dimension_numbers": NHWC, **more}
    rng = np.random.default_rng(seed)
    lhs, rhs = (rng.standard_normal(s).astype(np.float32) for s in (lhs_shape, rhs_shape))

    def plain(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, strides, padding, precision="highest", **more)

    def fp8(lhs, rhs, **options):
        return scaled_conv_general_dilated(lhs, rhs, strides, padding, **more, **options)

    dy = rng.standard_normal(jax.eval_shape(plain, lhs, rhs).shape).astype(np.float32)
    return lhs, rhs, dy, plain, fp8


def fake_quantized(x, fmt):
    """What one scale for the whole of `x` leaves of it."""
    return per_tensor(fmt)(np.asarray(x), None).astype(np.float32)


def value_and_gradients(function, *operands_and_dy):
    """``(y, d_lhs, d_rhs)``, compiled in one piece: one by one the operations take far longer."""
    return jax.jit(gradients_of(function))(*operands_and_dy)


@pytest.mark.representative(4)
@cases
def test_all_three_convolutions_are_those_of_fake_quantized_operands(case):
    lhs, rhs, dy, plain, fp8 = operands(case)
    recipe = recipes.Float8CurrentScaling()
    actual = value_and_gradients(lambda a, b: fp8(a, b, recipe=recipe), lhs, rhs, dy)
    quantized = [fake_quantized(*a) for a in ((lhs, E4M3), (rhs, E4M3), (dy, E5M2))]
    for a, e in zip(actual, value_and_gradients(plain, *quantized), strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) < 2e-6  # sums in f32 of at most 200 terms
    assert relative_error(actual[0], plain(lhs, rhs)) > 1e-3  # it was quantized


@pytest.mark.representative(3)
@cases
def test_over_patches_exact_values_give_the_exact_convolution(case):
    """Small integers are e4m3 values, and powers of two are their scales: nothing is rounded."""
    lhs, rhs, dy, plain, fp8 = operands(case)
    lhs, rhs, dy = (np.clip(np.round(2 * x), -8, 8) for x in (lhs, rhs, dy))
    quantized = lambda a, b: fp8(a, b, recipe=recipes.RowwiseScaling())
    actual = value_and_gradients(quantized, lhs, rhs, dy)
    for a, e in zip(actual, value_and_gradients(plain, lhs, rhs, dy), strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize(
    ("shape", "strides", "padding", "pointwise"),
    [
        ((1, 1, 5, 4), (1, 1), "SAME", True),
        ((1, 1, 5, 4), (2, 1), "SAME", False),  # the amax is that of all pixels
        ((1, 1, 5, 4), (1, 1), [(1, 0), (0, 0)], False),
        ((3, 1, 5, 4), (1, 1), "VALID", False),
    ],
)
def test_a_kernel_of_one_pixel_makes_a_matrix_product(shape, strides, padding, pointwise):
    """Which has FP8 tensor cores, as convolutions have not."""
    x, w = jnp.ones((2, 7, 6, 5)), jnp.ones(shape)

    def loss(x, w):
        return scaled_conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w))
    assert ("conv_general_dilated" in jaxpr) is not pointwise
    assert ("dot_general" in jaxpr) is pointwise


def test_the_implementation_is_the_one_that_is_asked_for():
    lhs, rhs, _, plain, fp8 = operands(CASES["3x3"])
    assert 0 < relative_error(fp8(lhs, rhs, implementation="emulate"), plain(lhs, rhs)) < 0.06
    with pytest.raises(ValueError, match="implementation.*'cudnn'"):
        fp8(lhs, rhs, implementation="cudnn")


def test_errors():
    lhs, rhs, *_ = operands(CASES["3x3"])
    with pytest.raises(ValueError, match=r"padding='SAME' with lhs_dilation=\(2, 1\)"):
        scaled_conv_general_dilated(lhs, rhs, (1, 1), "SAME", (2, 1), dimension_numbers=NHWC)
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        scaled_conv_general_dilated(lhs, rhs, (1, 1), "SAME", dimension_numbers=NHWC, recipe=3)
    with pytest.raises((TypeError, ValueError), match="feature"):
        scaled_conv_general_dilated(lhs[..., 1:], rhs, (1, 1), "SAME", dimension_numbers=NHWC)
    with pytest.raises(ValueError, match="takes neither conv_general_dilated"):
        jfp8.Conv(4, (3, 3), conv_general_dilated=lax.conv_general_dilated)
