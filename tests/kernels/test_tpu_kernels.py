"""The Pallas kernels for TPUs, interpreted, against NumPy in float64 and ml_dtypes."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jfp8.kernels.tpu.matmul import matmul
from jfp8.kernels.tpu.quantize_kernels import (
    line_amaxes,
    quantize_blocks,
    quantize_lines,
    quantize_tensor,
    quantize_tiles,
)
from jfp8.scaling.formats import E4M3FN, E5M2
from support.arrays import assert_same_codes

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def draw(shape, seed=0):
    """bf16 values of all sizes, with zeros, a NaN and an Inf."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    x[128:160, :64] = 0
    x[3, 5], x[200, 70] = np.nan, -np.inf
    return x.astype(BF16)


def cast(x, dtype):
    """To f8, as ml_dtypes rounds; finite values saturate, others become NaN."""
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.asarray(x, np.float32)
    return np.where(np.isfinite(x), np.clip(x, -limit, limit), np.nan).astype(dtype)


def block_amaxes(x, rows, columns):
    m, n = x.shape
    x = np.abs(x.astype(np.float32)).reshape(m // rows, rows, n // columns, columns)
    return np.where(np.isfinite(x).all((1, 3)), np.where(np.isfinite(x), x, 0).max((1, 3)), np.nan)


def power_of_two_above(ratio):
    """The smallest power of two that is not below, in exact arithmetic."""
    mantissa, exponent = np.frexp(ratio)
    return np.where(np.isnan(ratio), np.nan, np.ldexp(1.0, exponent - (mantissa == 0.5)))


def test_tensor_with_its_amax():
    """Of 1152 rows, which are no whole tiles of 1024: what lies behind must not count."""
    x = draw((1152, 384))
    q, bits = quantize_tensor(jnp.asarray(x), jnp.full((1, 1), 0.7), E5M2)
    scaled = x.astype(np.float32) * np.float32(0.7)
    assert_same_codes(q, cast(scaled, ml_dtypes.float8_e5m2))
    assert np.isnan(np.asarray(bits).view(np.float32).max())
    x[3, 5], x[200, 70] = 0, 0
    _, bits = quantize_tensor(jnp.asarray(x), jnp.ones((1, 1)), E5M2)
    assert np.asarray(bits).max().view(np.float32) == np.abs(x.astype(np.float32)).max()


def test_lines_with_their_amaxes():
    x = draw((256, 1152))
    values = np.abs(x.astype(np.float32))
    values = np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)
    by_row, by_column = line_amaxes(jnp.asarray(x))
    np.testing.assert_array_equal(np.max(by_row, 0), values.max(1))
    np.testing.assert_array_equal(np.max(by_column, 0), values.max(0))
    rng = np.random.default_rng(1)
    rows, columns = (rng.uniform(0.5, 2, n).astype(np.float32) for n in x.shape)
    found = quantize_lines(jnp.asarray(x), rows[:, None], columns[None], E4M3FN, dtype=None)
    wide = x.astype(np.float32)
    assert_same_codes(found[0], cast(wide * rows[:, None], F8))
    assert_same_codes(found[1], cast(wide * columns, F8))


@pytest.mark.parametrize(("block", "rounding"), [(128, "power_of_two"), (32, "rceil")])
def test_blocks_in_both_directions(block, rounding):
    x = draw((256, 1152))
    found = quantize_blocks(jnp.asarray(x), E4M3FN, block, rounding)
    for q, s, rows, columns in ((*found[:2], 1, block), (*found[2:], block, 1)):
        amaxes = block_amaxes(x, rows, columns)
        scale = np.where(amaxes == 0, 1.0, power_of_two_above(amaxes / 448))
        s = np.asarray(s)
        if s.dtype == np.uint8:  # a code of 0 is 2^-127: of zeros
            scale = np.where(amaxes == 0, 2.0**-127, scale)
            s = np.where(s == 255, np.nan, np.ldexp(1.0, s.astype(int) - 127))
        np.testing.assert_array_equal(s.T if rows == 1 else s, scale)
        each = np.repeat(np.repeat(scale, rows, 0), columns, 1)
        assert_same_codes(q, cast(x.astype(np.float64) / each, F8))


def test_tiles_serve_both_directions():
    x = draw((256, 384))
    q, s = quantize_tiles(jnp.asarray(x), E4M3FN, 128, "power_of_two")
    amaxes = block_amaxes(x, 128, 128)
    scale = np.where(amaxes == 0, 1.0, power_of_two_above(amaxes / 448))
    np.testing.assert_array_equal(s, np.repeat(scale, 128, 1))
    each = np.repeat(np.repeat(scale, 128, 0), 128, 1)
    assert_same_codes(q, cast(x.astype(np.float64) / each, F8))


def small(shape, rng):
    """f8 integers, whose sums are exact in f32."""
    return rng.integers(-8, 9, shape).astype(F8)


@pytest.mark.parametrize("summed", [(1, 0), (1, 1), (0, 0), (0, 1)])
def test_product_in_every_layout_with_scales_of_lines_and_a_bias(summed):
    rng = np.random.default_rng(2)
    m, n, k = 384, 128, 256
    a = small((m, k) if summed[0] else (k, m), rng)
    b = small((n, k) if summed[1] else (k, n), rng)
    u, v = (rng.uniform(0.5, 2, s).astype(np.float32) for s in ((m, 1), (1, n)))
    bias = rng.standard_normal((1, n)).astype(BF16)
    y = matmul(
        *map(jnp.asarray, (a, b)),
        *(summed, BF16),
        scales=tuple(map(jnp.asarray, (u, v))),
        in_blocks=False,
        bias=jnp.asarray(bias),
    )
    first, second = a.astype(np.float64), b.astype(np.float64)
    exact = (first if summed[0] else first.T) @ (second.T if summed[1] else second)
    scaled = (exact.astype(np.float32) * (u * v)).astype(BF16)
    expected = (scaled.astype(np.float32) + bias.astype(np.float32)).astype(BF16)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("block", "k"), [(128, 256), (32, 256), (128, 1152)])
def test_product_in_blocks(block, k):
    """The last step of 1152 terms has 128: what is read behind them must not count."""
    rng = np.random.default_rng(3)
    m, n = 256, 128
    a, b = small((m, k), rng), small((k, n), rng)
    codes = [rng.integers(125, 130, (k // block, size)).astype(np.uint8) for size in (m, n)]
    codes[0][1, 7] = 255
    s, t = (np.where(c == 255, np.nan, np.ldexp(1.0, c.astype(int) - 127)) for c in codes)
    scales = codes if block == 32 else [s.astype(np.float32), t.astype(np.float32)]
    blocks = tuple(map(jnp.asarray, scales))
    arrays = jnp.asarray(a), jnp.asarray(b)
    y = matmul(*arrays, (1, 0), jnp.float32, scales=blocks, in_blocks=True)
    s, t = (np.repeat(x, block, 0) for x in (s, t))
    expected = (a.astype(np.float64) * s.T) @ (b.astype(np.float64) * t)
    assert np.isnan(expected[7]).all()
    np.testing.assert_array_equal(y, expected.astype(np.float32))
