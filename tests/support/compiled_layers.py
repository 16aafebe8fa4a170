"""Shared by the tests compiled for an H200 and for a B200, which run in processes of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jfp8
from gpu_programs import compile_for, forward_and_backward
from jfp8 import recipes
from support.models import gradients_of

F8, F8_GRAD, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
PAIRS = {"e4m3×e4m3": (F8, F8), "e5m2×e4m3": (F8_GRAD, F8), "e4m3×e5m2": (F8, F8_GRAD)}

Dense = partial(jfp8.Dense, dtype=BF16, param_dtype=BF16)

PER_TENSOR = {
    "delayed": recipes.DelayedScaling(),
    "delayed, e4m3, powers of two": recipes.DelayedScaling(
        fp8_format="E4M3", scale_rounding="power_of_two"
    ),
    "current": recipes.Float8CurrentScaling(),
    "hybrid": recipes.Hybrid(),
    "unscaled": recipes.Unscaled(),
}


def of(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_by_cublaslt(program, products, size, dtype="bf16"):
    """All `products` are cuBLASLt's FP8, and nothing of `size` elements or more is f32."""
    hlo = program.hlo
    assert len(hlo.f8_products) == products
    assert hlo.other_products == []
    assert not any(kernel.qgmma or kernel.other_mma for kernel in program.kernels)
    assert {call.results[0].dtype for call in hlo.f8_products} == {dtype}
    assert hlo.passes_over_outputs == hlo.rounded_scales == []
    if dtype != "f32":
        assert hlo.f32_written(size) == []
    fast = [call for call in hlo.f8_products if "F8_F32_FAST_ACCUM" in call.attributes]
    assert 3 * len(fast) == products
    assert all("ANY_F8_ANY_F8_F32" in call.attributes for call in hlo.f8_products)


def gradients_of_groups(recipe):
    """The same for grouped products, of (x, w, sizes, cotangent)."""

    def f(x, w, sizes, dy):
        product = lambda x, w: jfp8.scaled_ragged_dot(x, w, sizes, recipe=recipe)
        return gradients_of(product)(x, w, dy)

    return f


def is_rotation(product):
    """NVFP4's: by a matrix of 16x16."""
    return 16 in product.results[0].shape


def assert_costs(target, names, n, cost):
    """Those of the model of time: not less than compiled, and not half as much again."""
    launches, moved = [], []
    for name in names:
        layer = Dense(n, use_bias=False, recipe=recipes.get(name))
        f, args = forward_and_backward(layer, (n, n))
        hlo = compile_for(target, f, *args).hlo
        assert len(hlo.fp8_products) == 3
        launches.append(len(hlo.launched))
        # Once there is a history, delayed scaling does not read for the amax.
        amax = 2.0 if name == "delayed" else 0.0
        moved.append(hlo.bytes_beside_products / (3 * n**2) - amax)
    assert np.mean(launches) <= 1.05 * cost.launches <= 1.5 * np.mean(launches)
    assert np.mean(moved) <= 1.05 * cost.bytes <= 1.5 * np.mean(moved)
