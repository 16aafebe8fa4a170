"""`scaled_matmul(accumulation=...)`: sums of integers in chunks, against f32 in numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import ScaledArray, recipes, scaled_dot_general
from jfp8.matmul import tensor_core_sums as hopper

PLAIN = (((1,), (0,)), ((), ()))
BATCHED = (((2,), (1,)), ((0,), (0,)))
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
E8M0 = ml_dtypes.float8_e8m0fnu
UNIT_ROUNDOFF = 2.0**-24
matmul = jax.jit(
    jfp8.scaled_matmul,
    static_argnames=("dimension_numbers", "accumulation", "preferred_element_type"),
)


def operand(shape, block, kind="f32", dtype=E4M3, seed=0) -> ScaledArray:
    """Integers with random scales, one for each `block`: of f32, of E8M0, or in two levels."""
    rng = np.random.default_rng(seed)
    largest = {E4M3: 15, E5M2: 7, E2M1: 4}[dtype]
    data = rng.integers(-largest, largest + 1, shape).astype(np.float32).astype(dtype)
    if block is None:
        return ScaledArray(jnp.asarray(data), jnp.float32(rng.uniform(0.5, 2)))
    block = tuple(n if b is None else b for n, b in zip(shape, block))
    counts = tuple(-(-n // b) for n, b in zip(shape, block))
    if kind == "e8m0":
        scale = jnp.asarray(rng.integers(125, 130, counts).astype(np.uint8).view(E8M0))
    elif kind == "two-level":
        narrow = jnp.asarray(rng.uniform(0.5, 400, counts).astype(np.float32).astype(E4M3))
        scale = ScaledArray(narrow, jnp.float32(rng.uniform(0.001, 0.01)))
    else:
        scale = jnp.asarray(rng.uniform(0.5, 2, counts), jnp.float32)
    ragged = any(n % b for n, b in zip(shape, block))
    return ScaledArray(jnp.asarray(data), scale, block if ragged else None)


def f32_scale(q) -> np.ndarray:
    """The scale of each element, f32, of the shape of the data."""
    if isinstance(q.scale, ScaledArray):
        scale = np.asarray(q.scale.data).astype(np.float32) * np.float32(q.scale.scale)
    else:
        scale = np.asarray(q.scale).astype(np.float32)
    if scale.ndim == 0:
        return np.broadcast_to(scale, q.shape)
    for axis, n in enumerate(q.shape):
        if q.block:
            size = q.block[axis]
        else:
            size = n // scale.shape[axis]
        scale = np.repeat(scale, size, axis=axis)[(slice(None),) * axis + (slice(n),)]
    return scale


def every_128(lhs, rhs) -> np.ndarray:
    """``sum_c f32(scale_c * sum_{k in c} a_k b_k)``, one f32 addition after the other."""
    a, b = (np.asarray(q.data).astype(np.float64) for q in (lhs, rhs))
    a_scale, b_scale = f32_scale(lhs), f32_scale(rhs)
    total = np.zeros(np.matmul(a, b).shape, np.float32)
    for start in range(0, a.shape[-1], 128):
        c = slice(start, start + 128)
        partial_sum = np.matmul(a[..., c], b[..., c, :])
        assert abs(partial_sum).max(initial=0) < 2**24
        scale = a_scale[..., start, None] * b_scale[..., start, None, :]  # constant in the chunk
        total = total + partial_sum.astype(np.float32) * scale
    return total


# How the blocks of lhs [m, k] and rhs [k, n] lie, the kind of scales and of data.
LAYOUTS = {
    "1x128 and 128x128": ((1, 128), (128, 128), "f32", E4M3),
    "1x128 both": ((1, 128), (128, 1), "f32", E4M3),
    "1x256 and per tensor": ((1, 256), None, "f32", E5M2),
    "1x128 and per column": ((1, 128), (None, 1), "f32", E4M3),
    "two-level 1x128": ((1, 128), (128, 128), "two-level", E2M1),
    "E8M0 1x128": ((1, 128), (128, 1), "e8m0", E4M3),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def pair(layout, m, k, n, batch=()):
    lhs_block, rhs_block, kind, dtype = layout
    lhs_block, rhs_block = (b and (1,) * len(batch) + b for b in (lhs_block, rhs_block))
    return (
        operand((*batch, m, k), lhs_block, kind, dtype, seed=k),
        operand((*batch, k, n), rhs_block, kind, dtype, seed=k + 1),
    )


def assert_close(y, expected, k):
    """Bitwise but for one fused multiply-add a chunk, far less than what another order makes."""
    y, expected = np.asarray(y, np.float64), expected.astype(np.float64)
    assert y.shape == expected.shape
    assert abs(expected).max() > 0
    chunks = -(-k // 128)
    assert (abs(y - expected) <= 2 * chunks * UNIT_ROUNDOFF * abs(expected).max()).all()


@pytest.mark.slow
@layouts
@pytest.mark.parametrize(("k", "batch"), [(384, ()), (300, (3,))], ids=str)
def test_f32_every_128(layout, k, batch):
    if LAYOUTS[layout][-1] is E2M1 and jax.__version_info__ < (0, 11):
        pytest.skip("XLA:CPU cannot compile slices of 4-bit values")
    lhs, rhs = pair(LAYOUTS[layout], 5, k, 130, batch)
    y = matmul(lhs, rhs, BATCHED if batch else PLAIN, accumulation="f32_every_128")
    assert_close(y, every_128(lhs, rhs), k)


def test_chunks_are_visible():
    """2^24 + (1 + 1) and 2^24 + 1 + 1 differ in f32: a chunk of 2^24, then one of two ones."""
    lhs = np.zeros((1, 256), np.float32)
    rhs = np.zeros((256, 1), np.float32)
    lhs[0, :64], rhs[:64, 0] = 256, 256
    lhs[0, 64:128], rhs[64:128, 0] = 256, 256
    lhs[0, 128], rhs[128, 0] = 1, 1
    lhs[0, 192], rhs[192, 0] = 1, 1
    lhs[0, 0] = 0  # 127 * 2^16
    scale = jnp.float32([[1.0, 2.0**-1]])
    q_lhs = ScaledArray(jnp.asarray(lhs.astype(E4M3)), scale)
    q_rhs = ScaledArray(jnp.asarray(rhs.astype(E4M3)), jnp.float32(1 / 3))
    y = matmul(q_lhs, q_rhs, PLAIN, accumulation="f32_every_128")
    third = np.float32(1 / 3)
    first = np.float32(127 * 2**16) * third
    assert y.item() == first + np.float32(2) * (np.float32(0.5) * third)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["f32_every_128", "hopper", "hopper_every_128"])
def test_empty_sums_and_results(accumulation):
    for m, k, n in ((3, 0, 2), (0, 200, 2), (3, 200, 0)):
        lhs = ScaledArray(jnp.zeros((m, k), E4M3), jnp.float32(1))
        rhs = ScaledArray(jnp.zeros((k, n), E4M3), jnp.float32(1))
        y = matmul(lhs, rhs, PLAIN, accumulation=accumulation)
        np.testing.assert_array_equal(y, np.zeros((m, n)))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["f32_every_128", "hopper", "hopper_every_128"])
def test_non_finite_scales_and_data_show(accumulation):
    lhs, rhs = pair(LAYOUTS["1x128 and 128x128"], 4, 300, 130)
    scale = lhs.scale.at[2, 1].set(jnp.nan)
    data = jnp.asarray(rhs.data).astype(jnp.float32).at[299, 7].set(jnp.nan).astype(E4M3)
    y = matmul(
        ScaledArray(lhs.data, scale, lhs.block),
        ScaledArray(data, rhs.scale, rhs.block),
        PLAIN,
        accumulation=accumulation,
    )
    expected = np.zeros((4, 130), bool)
    expected[2] = True
    expected[:, 7] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def random_f8(shape, seed, dtype=E4M3):
    """N(0, 40^2), of which 14 bits of a sum cut something off."""
    x = np.random.default_rng(seed).normal(size=shape) * 40
    return jnp.asarray(x.astype(np.float32).astype(dtype))


@pytest.mark.parametrize(
    ("length", "k"), [(32, 300), pytest.param(128, 300, marks=pytest.mark.slow)]
)
def test_hopper_is_promoted_every_128_and_wherever_a_scale_changes(k, length):
    """Bitwise the f32 sum of the scaled chains of each stretch."""
    lhs, rhs = random_f8((6, k), 3), random_f8((k, 5), 4)
    starts = range(0, k, length)
    chains = [
        np.asarray(hopper.dot_general(lhs[:, s : s + length], rhs[s : s + length], PLAIN))
        for s in starts
    ]
    if length == 32:  # powers of two, which scale exactly
        codes = np.random.default_rng(5).integers(120, 135, (6, len(starts))).astype(np.uint8)
        scale = jnp.asarray(codes.view(E8M0))
        a = ScaledArray(lhs, scale, (1, 32) if k % 32 else None)
        values = np.exp2(codes.astype(np.float32) - 127)
        modes = ("hopper",)
    else:
        a, values = ScaledArray(lhs, jnp.float32(1)), np.ones((6, len(starts)), np.float32)
        modes = ("hopper_every_128",)
    total = np.zeros((6, 5), np.float32)
    for i, chain in enumerate(chains):
        total = total + chain * values[:, i : i + 1]
    for accumulation in modes:
        y = matmul(a, ScaledArray(rhs, jnp.float32(1)), PLAIN, accumulation=accumulation)
        np.testing.assert_array_equal(y, total)


@pytest.mark.slow
def test_recipe_is_fast_forward_and_promoted_backward():
    """What Hopper does for a recipe that allows fast accumulation in fprop only."""
    recipe = recipes.RowwiseScaling(accumulation="hopper")
    rows, columns = jfp8.PerAxis(0), jfp8.PerAxis(1)
    rng = np.random.default_rng(8)
    lhs, rhs, dy = (rng.uniform(0.5, 1, (192, 192)).astype(np.float32) for _ in range(3))

    @jax.jit
    def run(lhs, rhs, dy):
        y, vjp = jax.vjp(lambda *x: scaled_dot_general(*x, PLAIN, recipe=recipe), lhs, rhs)
        return y, *vjp(dy)

    quantize = jax.jit(
        functools.partial(jfp8.quantize, scale_rounding="power_of_two"),
        static_argnames="granularity",
    )
    products = (
        ((lhs, rows), (rhs, columns), PLAIN),
        ((dy, rows), (rhs, rows), (((1,), (1,)), ((), ()))),
        ((lhs, columns), (dy, columns), (((0,), (0,)), ((), ()))),
    )
    results = run(lhs, rhs, dy)
    for i, (a, b, numbers) in enumerate(products):
        quantized = [quantize(x, granularity=granularity) for x, granularity in (a, b)]
        mode, other = ("hopper_every_128", "f32") if i else ("hopper", "hopper_every_128")
        np.testing.assert_array_equal(results[i], matmul(*quantized, numbers, accumulation=mode))
        assert not np.array_equal(results[i], matmul(*quantized, numbers, accumulation=other))


def unit_scaled(dtype):
    return ScaledArray(jnp.zeros((32, 32), dtype), jnp.float32(1))


@pytest.mark.parametrize("accumulation", ["hopper", "hopper_every_128"])
def test_error_formats_that_hopper_does_not_multiply(accumulation):
    words = rf"accumulation='{accumulation}'.*E4M3FN and E5M2.*E2M1FN.*accumulation='f32'"
    with pytest.raises(ValueError, match=words):
        jfp8.scaled_matmul(unit_scaled(E2M1), unit_scaled(E4M3), PLAIN, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", ["f32_every_128", "hopper", "hopper_every_128"])
def test_error_xla_accumulates_as_the_device_does(accumulation):
    words = rf"implementation='xla' does not support accumulation='{accumulation}'.*'emulate'"
    with pytest.raises(NotImplementedError, match=words):
        jfp8.scaled_matmul(
            *(unit_scaled(E4M3),) * 2, PLAIN, accumulation=accumulation, implementation="xla"
        )


@pytest.mark.parametrize("accumulation", ["f16", None, "hopper_fast"])
def test_error_unknown_accumulation(accumulation):
    words = rf"accumulation={accumulation!r} is unknown.*'f32', 'f32_every_128', 'hopper', 'hopper_"
    with pytest.raises(ValueError, match=words):
        jfp8.scaled_matmul(*(unit_scaled(E4M3),) * 2, PLAIN, accumulation=accumulation)
    with pytest.raises(ValueError, match=r"RowwiseScaling\(accumulation=.*allowed are 'f32', 'f32"):
        recipes.RowwiseScaling(accumulation=accumulation)
