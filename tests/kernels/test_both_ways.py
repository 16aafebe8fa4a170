"""Quantizing in both directions by a kernel, which is interpreted, against the two steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.kernels.quantize_and_transpose import has_kernel, quantize_both_ways
from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Context, Current, Delayed, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.scales import amax
from support.devices import needs_mosaic

E4M3, E5M2 = jfp8.E4M3FN, jfp8.E5M2
NEW = {"amax_history": jnp.zeros(4), "amax": jnp.zeros(())}
SEEN = {"amax_history": jnp.array([3.0, 0.5, 0.0, 0.0]), "amax": jnp.array(7.0)}
LONG = {"amax_history": jnp.arange(100.0), "amax": jnp.array(-50.0)}
IN_STEP = {"amax_history": jnp.zeros(4), "amax": jnp.array(1000.0)}


def matrix(dtype, m=100, n=150):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(m, n)) * 2.0 ** rng.integers(-4, 5, size=(m, 1))
    x[7, 3], x[20, 40:90] = 0, 0
    return jnp.asarray(x, dtype)


def in_two_steps(quantizer, x, state):
    largest = amax(x)
    return (
        quantizer(x, Context((1,), largest, state)),
        quantizer(x, Context((0,), largest, state)).T,
        largest,
    )


@needs_mosaic
def test_a_kernel_computes_its_scale_as_a_number():
    """The compiler searches a layout for every array, which took most of the lowering."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    quantize = lambda x: quantize_both_ways(Delayed(E4M3, length=4), None, x, SEEN)
    with plgpu.force_gpu_interpret_mode():
        program = jax.make_jaxpr(quantize)(matrix(jnp.bfloat16, 128, 128))
    results = re.findall(r":(f32|i32|bool)\[(128)?\] = ", str(program))
    arrays = [size for _, size in results if size]
    assert len(arrays) < 30 < len(results) - len(arrays)


@pytest.mark.representative(4)
@needs_mosaic
@pytest.mark.parametrize(
    ("quantizer", "state", "dtype"),
    [
        (Unit(E5M2), None, jnp.bfloat16),
        (Current(E4M3, "power_of_two"), None, jnp.float16),
        (Delayed(E4M3), None, jnp.bfloat16),
        (Delayed(E5M2, margin=1, length=4), NEW, jnp.bfloat16),
        (Delayed(E4M3, algo="most_recent", length=4), SEEN, jnp.bfloat16),
        (Delayed(E4M3, length=4), IN_STEP, jnp.float32),
        (Delayed(E4M3, length=100), LONG, jnp.bfloat16),
        (Rowwise(E4M3), None, jnp.bfloat16),
        (Blockwise(E4M3, (128, 1)), None, jnp.bfloat16),
        (Blockwise(E5M2, (128, 128), "power_of_two"), None, jnp.bfloat16),
        (Blockwise(E4M3, (32, 1), "rceil"), None, jnp.bfloat16),
    ],
    ids=str,
)
def test_the_same_bytes_scales_and_amax(quantizer, state, dtype):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    assert has_kernel(quantizer)
    x = matrix(dtype)
    expected = jax.jit(in_two_steps, static_argnums=0)(quantizer, x, state)
    with plgpu.force_gpu_interpret_mode():
        found = quantize_both_ways(quantizer, None, x, state)
    found = found._replace(amax=jnp.max(found.amax))
    assert [q.block for q in found[:2]] == [q.block for q in expected[:2]]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.atleast_1d(np.asarray(v)).view(np.uint8) for v in (a, b))
        np.testing.assert_array_equal(a, b)
    assert np.unique(np.asarray(found.straight.data).view(np.uint8)).size > 20


@pytest.mark.representative(2)
@needs_mosaic
@pytest.mark.parametrize(
    ("quantizer", "state"),
    [
        (Delayed(E4M3, length=4), NEW),
        (Blockwise(E4M3, (128, 128), "power_of_two"), None),
        (Current(E4M3), None),
        (Rowwise(E4M3), None),
        (Blockwise(E4M3, (128, 1)), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cast_as_it_is_read(quantizer, state, dtype):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x = matrix(jnp.float32)
    x = x.at[3, 3].set(70000.0 if dtype == jnp.bfloat16 else 65519.0)  # the cast changes both
    expected = jax.jit(in_two_steps, static_argnums=0)(quantizer, x.astype(dtype), state)
    with plgpu.force_gpu_interpret_mode():
        found = quantize_both_ways(quantizer, np.dtype(dtype), x, state)
    found = found._replace(amax=jnp.max(found.amax))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.atleast_1d(np.asarray(v)).view(np.uint8) for v in (a, b))
        np.testing.assert_array_equal(a, b)
    assert float(found.amax) == float(x[3, 3].astype(dtype)) != float(x[3, 3])


@needs_mosaic
@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("quantizer", "state"),
    [(Delayed(E5M2, length=4), SEEN), (Current(E4M3), None), (Unit(E5M2), None)],
    ids=str,
)
def test_factors_of_products(quantizer, state):
    """They are the scales' products, to the bit, and never Inf, which makes NaN of 0."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    met = jnp.float32(0.37), jnp.float32(2.0**120)
    x = (matrix(jnp.float32) * 2.0**20).astype(jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        found = quantize_both_ways(quantizer, None, x, state, met)
        one = quantize_both_ways(quantizer, None, x, state, (None, met[0])).transposed
    for q, scale in ((found.straight, met[0]), (found.transposed, met[1]), (one, met[0])):
        exact = float(q.scale) * float(scale)  # in f64
        assert q.factor == np.float32(min(exact, float(np.finfo(np.float32).max)))
        y = q.data.astype(jnp.float32) @ jnp.ones((q.shape[1], 3))
        other = jfp8.ScaledArray(jnp.ones((q.shape[1], 3), E4M3.dtype), scale)
        in_f32 = jfp8.scaled_matmul(q, other, (((1,), (0,)), ((), ())), implementation="emulate")
        np.testing.assert_array_equal(in_f32, y * q.factor)


@pytest.mark.parametrize(
    "quantizer",
    [
        Current(E4M3, rounding="stochastic"),
        Current(jfp8.E3M4),
        Current(E4M3, "rceil"),
        Blockwise(E4M3, (64, 1)),
        Blockwise(E4M3, (32, 32), "rceil"),
        TwoLevel(jfp8.E2M1FN, (16, 1)),
    ],
    ids=str,
)
def test_what_has_no_kernel(quantizer):
    assert not has_kernel(quantizer)


def test_a_quantizer_derived_from_one_with_a_kernel_has_none():
    """It may do anything."""

    class Halved(Current):
        def __call__(self, x, context):
            return super().__call__(x / 2, context)

    assert has_kernel(Current(E4M3))
    assert not has_kernel(Halved(E4M3))
