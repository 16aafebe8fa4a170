"""Weights that are only kept in FP8: a `ScaledArray` where a kernel was, in products and layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import ScaledArray, recipes
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from support.arrays import on_host, relative_error

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling()
MATRIX = (((1,), (0,)), ((), ()))
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
X = jax.random.normal(jax.random.key(1), (6, 32))
W = jax.random.normal(jax.random.key(2), (32, 16))
IMAGES = jax.random.normal(jax.random.key(3), (2, 5, 5, 4))
KERNEL = jax.random.normal(jax.random.key(4), (3, 3, 4, 8))


def dot(x, w, recipe=CURRENT, **options):
    return jfp8.scaled_dot_general(x, w, MATRIX, recipe=recipe, **options)


def conv(x, w, recipe=CURRENT, **options):
    return jfp8.scaled_conv_general_dilated(x, w, (1, 1), "SAME", recipe=recipe, **NHWC, **options)


OPERANDS = {"dot": (dot, X, W), "conv": (conv, IMAGES, KERNEL)}


@pytest.fixture(params=OPERANDS)
def product(request):
    return OPERANDS[request.param]


def value_and_gradient(function, x, *args):
    """``y`` and the gradient by `x` for a gradient of `y` with all magnitudes."""
    y, vjp = jax.vjp(lambda x: function(x, *args), x)
    dy = jax.random.normal(jax.random.key(9), y.shape)
    return y, vjp(dy.astype(y.dtype))[0]


@pytest.mark.slow
def test_gradient_by_the_input_is_that_of_quantized_operands(product):
    """Against plain products of what ml_dtypes rounds."""
    function, x, w = product
    q = jfp8.quantize(w)
    y, grad = jax.jit(lambda x: value_and_gradient(function, x, q))(x)

    def fake(x, dtype):
        scale = np.abs(x).max() / np.float32(ml_dtypes.finfo(dtype).max)
        return (np.asarray(x) * (np.float32(1) / scale)).astype(dtype).astype(np.float32) * scale

    if function is dot:
        plain = lambda x: x @ on_host(q)
    else:
        plain = lambda x: jax.lax.conv_general_dilated(x, on_host(q), (1, 1), "SAME", **NHWC)
    y_oracle, vjp = jax.vjp(plain, jnp.asarray(fake(x, ml_dtypes.float8_e4m3fn)))
    dy = jax.random.normal(jax.random.key(9), y.shape)
    assert relative_error(y, y_oracle) < 1e-6
    assert relative_error(grad, vjp(jnp.asarray(fake(dy, ml_dtypes.float8_e5m2)))[0]) < 1e-6
    assert relative_error(grad, vjp(dy)[0]) > 1e-2


def test_bytes_are_used_as_they_are_and_have_no_gradient(product):
    """Nothing rounds the weight again: its bytes go into both products, and there is no third."""
    function, x, w = product
    q = jfp8.quantize(w)
    loss = lambda x, scale: jnp.sum(function(x, ScaledArray(q.data, scale)))
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, q.scale))
    again = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(function(x, w))))(w))
    shape = ",".join(map(str, w.shape))
    assert f"f8_e4m3fn[{shape}]" in text
    assert "jfp8_dgrad" in text
    assert ("jfp8_wgrad" in text, "jfp8_wgrad" in again) == (False, True)
    shifts = lambda text: len(
        [t for t in text.splitlines() if f"u32[{shape}]" in t and "shift_right" in t]
    )
    assert shifts(text) < shifts(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("dot", Float8CurrentScaling(fp8_format="E5M2")),  # another format
        ("dot", recipes.MXFP8BlockScaling()),
        ("dot", recipes.get("nvfp4")),
        ("conv", Float8CurrentScaling(fp8_format="E5M2")),
        ("conv", recipes.RowwiseScaling()),  # by rows of patches
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_other_recipes_quantize_its_values(name, recipe):
    function, x, w = OPERANDS[name]
    q = jfp8.quantize(w)
    run = jax.jit(lambda w: value_and_gradient(lambda x, w: function(x, w, recipe), x, w))
    ours = run(q)
    for a, b in zip(ours, run(jnp.asarray(on_host(q))), strict=True):
        np.testing.assert_array_equal(a, b)
    assert relative_error(ours[0], jax.jit(function)(x, q)) > 1e-3  # not what its bytes give


@pytest.mark.slow
def test_delayed_scaling_leaves_its_bytes_alone():
    """The history would give another scale; the bytes have theirs."""
    q = jfp8.quantize(W)
    history = lambda amax: {"amax_history": jnp.full((16,), amax), "amax": jnp.zeros(())}
    state = {"lhs": history(5.0), "rhs": history(100.0), "grad": history(1.0)}
    far = {**state, "rhs": history(0.01)}
    run = lambda state: np.asarray(jax.jit(lambda: dot(X, q, DELAYED, state=state))())
    np.testing.assert_array_equal(run(state), run(far))
    assert np.any(run(state) != run({**state, "lhs": history(50.0)}))


def test_scales_that_do_not_fit():
    q = jfp8.quantize(W)
    with pytest.raises(ValueError, match="scale"):
        dot(X, ScaledArray(q.data, jnp.ones((5, 1))))
    with pytest.raises((TypeError, ValueError), match="lhs"):
        jfp8.scaled_dot_general(jfp8.quantize(X), W, MATRIX, recipe=CURRENT)


def test_layers_without_fp8_multiply_its_values():
    params = {"kernel": jfp8.quantize(W), "bias": jnp.zeros(16)}
    plain = {**params, "kernel": jnp.asarray(on_host(params["kernel"]))}
    with jfp8.autocast(enabled=False):
        y = jax.jit(jfp8.Dense(16).apply)({"params": params}, X)
    np.testing.assert_array_equal(y, jax.jit(nn.Dense(16).apply)({"params": plain}, X))
