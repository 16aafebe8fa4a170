"""The GPU's quantization kernels, interpreted: bitwise identical to the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need JAX 0.11.2", allow_module_level=True)

import jfp8
from jfp8.kernels.hopper.quantize import (
    quantize_lines,
    quantize_rows_in_blocks,
    quantize_tensor,
    quantize_tiles,
    row_and_column_amax,
    tensor_amax,
)
from jfp8.kernels.hopper.sweep import Sweep, largest_of
from jfp8.kernels.scales_in_kernels import nearest_quotient, scale_and_inverse
from support.arrays import assert_same_codes
from support.interpreter import no_races

SMALL = Sweep(rows=64, columns=64, blocks=4)


@pytest.fixture
def interpreted():
    """The interpreter, with its race detection looked at when the test is over."""
    with no_races():
        yield


def numbers(shape, dtype, special=(), seed=0):
    """Numbers of many magnitudes of which no two rows or columns agree, and `special` ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x[shape[0] // 2] = 0
    x[:, shape[1] // 3] = -0.0
    for value in special:
        x[rng.integers(shape[0]), rng.integers(shape[1])] = value
    return jnp.asarray(x, dtype)


def largest(amaxes):
    """The f32 whose bits are the largest integer."""
    return np.asarray(amaxes).max().view(np.float32)


@pytest.mark.parametrize(
    ("dtype", "shape", "special"),
    [
        (jnp.bfloat16, (64, 128), ()),
        (jnp.float32, (300, 200), (-30000.0,)),
        (jnp.float16, (65, 129), (-np.inf,)),
        (jnp.bfloat16, (64, 64), (np.nan,)),
    ],
)
def test_tensor_amax(interpreted, dtype, shape, special):
    x = numbers(shape, dtype, special)
    got = largest(tensor_amax(x, jnp.zeros(1)))
    np.testing.assert_array_equal(got, jfp8.scaling.amax(x))


@pytest.mark.parametrize(
    ("known", "read"), [(0.0, True), (np.nan, True), (np.inf, True), (-3.0, True), (2.5, False)]
)
def test_a_known_amax_spares_reading(interpreted, known, read):
    # 26 slices, most blocks have none; the largest is in the last of them.
    x = numbers((320, 320), jnp.float32).at[-1, -1].set(1e4)
    amaxes = tensor_amax(x, jnp.float32([known / 2, known, 7]), entries=2)
    assert largest(amaxes) == (jfp8.scaling.amax(x) if read else known)


@pytest.mark.parametrize(
    ("dtype", "sweep"), [(jnp.bfloat16, None), (jnp.float16, SMALL), (jnp.float32, SMALL)]
)
def test_row_and_column_amax(interpreted, dtype, sweep):
    x = numbers((200, 300), dtype, (np.nan, np.inf, -30000.0))
    rows, columns = row_and_column_amax(x, sweep=sweep)
    assert rows.dtype == columns.dtype == jnp.float32
    np.testing.assert_array_equal(rows, jfp8.scaling.amax(x, jfp8.PerAxis(0))[:, 0])
    np.testing.assert_array_equal(columns, jfp8.scaling.amax(x, jfp8.PerAxis(1))[0])


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("shape", "sweep", "dtype", "fmt"),
    [
        ((128, 128), None, jnp.bfloat16, jfp8.E4M3FN),
        ((100, 300), None, jnp.float32, jfp8.E5M2),
        ((200, 300), SMALL, jnp.float16, jfp8.E4M3FN),
        ((256, 192), Sweep(rows=128, columns=64, blocks=1), jnp.bfloat16, jfp8.E5M2),
        ((192, 256), Sweep(rows=64, stages=1, blocks=4), jnp.float32, jfp8.E4M3FN),
    ],
)
def test_quantize_lines(interpreted, shape, sweep, dtype, fmt):
    x = numbers(shape, dtype, (np.nan, np.inf, -np.inf, 30000.0, -60000.0))
    finite = jnp.where(jnp.isfinite(x), x, 0)
    # Five times the largest factors that fit, so that some values saturate.
    per_row = 5 * fmt.max / (1 + jnp.max(jnp.abs(finite), axis=1)).astype(jnp.float32)
    per_column = 5 * fmt.max / (1 + jnp.max(jnp.abs(finite), axis=0)).astype(jnp.float32)
    q, q_t = quantize_lines(x, per_row, per_column, fmt, sweep=sweep)
    x32 = jnp.where(jnp.isfinite(x), x, jnp.nan).astype(jnp.float32)
    assert_same_codes(q, jfp8.cast(x32 * per_row[:, None], fmt))
    assert_same_codes(q_t, jfp8.cast(x32 * per_column[None, :], fmt).T)


@pytest.mark.parametrize("special", [(), (np.inf,)])
@pytest.mark.parametrize("with_amax", [True, False])
def test_quantize_tensor(interpreted, special, with_amax):
    """The scale is that of the larger of two vectors, which saturates some."""
    x = numbers((200, 200), jnp.bfloat16, special)
    known = jnp.float32([0.25]), jnp.asarray(np.arange(128).astype(np.float32).view(np.int32))

    def scale_of(one, many):
        amax = jnp.maximum(largest_of(many), one[0]) / 64
        return scale_and_inverse(amax, jfp8.E4M3FN, None)

    q, q_t, scale, *amaxes = quantize_tensor(
        x, *known, fmt=jfp8.E4M3FN, scale_of=scale_of, with_amax=with_amax, sweep=SMALL,
    )  # fmt: skip
    want = jfp8.quantize(x, scale=jnp.float32(127 / 64 / 448))
    np.testing.assert_array_equal(scale, want.scale[None])
    assert_same_codes(q, want.data)
    assert_same_codes(q_t, want.data.T)
    assert [largest(a) for a in amaxes] == [jfp8.scaling.amax(x)] * with_amax


@pytest.mark.parametrize("rounding", [None, "power_of_two"])
@pytest.mark.parametrize("margin", [0, 3])
def test_scales_made_in_a_kernel(rounding, margin):
    """Also at the ends of f32."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0x00800000, 0x7F800000, 20_000).astype(np.int32)
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    special = np.float32([0, tiny * 500, huge, huge / 2, 448, 57344, 1, np.inf, np.nan])
    amaxes = np.concatenate([bits.view(np.float32), special])
    for fmt in (jfp8.E4M3FN, jfp8.E5M2):
        # CPUs flush a subnormal quotient to zero before the margin can lift it.
        flushed = (amaxes > 0) & (amaxes < fmt.max * tiny) & (margin > 0)
        amax = amaxes[~flushed]
        options = {"margin": margin, "scale_rounding": rounding, "poison": False}
        want = jfp8.scaling.scale_from_amax(amax, fmt, **options)
        scale, inverse = jax.jit(
            lambda a, fmt=fmt: scale_and_inverse(a, fmt, rounding, margin=margin, poison=False)
        )(amax)
        np.testing.assert_array_equal(scale, want)
        exact = (1 / np.asarray(want, np.float64)).astype(np.float32)
        np.testing.assert_array_equal(inverse, exact)


def blocks_of_both(x, fmt, block, rounding):
    """What `jfp8.quantize` gives along rows and along columns, and which elements are poisoned."""
    for y in (x, x.T):
        want = jfp8.quantize(y, fmt, granularity=jfp8.Block((1, block)), scale_rounding=rounding)
        scale = want.scale
        if scale.dtype != jnp.float32:
            scale = lax.bitcast_convert_type(scale, jnp.uint8)
            bad = scale == 255
        else:
            bad = jnp.isnan(scale)
        yield want.data, scale.T, np.repeat(bad, block, axis=1)[:, : y.shape[1]]


@pytest.mark.representative(4)
@pytest.mark.parametrize(
    ("fmt", "block", "rounding", "dtype", "shape", "sweep"),
    [
        (jfp8.E4M3FN, 128, None, jnp.bfloat16, (256, 384), Sweep(blocks=4)),
        (jfp8.E5M2, 128, None, jnp.float32, (130, 257), None),
        (jfp8.E4M3FN, 128, "power_of_two", jnp.float16, (128, 200), None),
        (jfp8.E5M2, 128, "power_of_two", jnp.bfloat16, (100, 128), None),
        (jfp8.E4M3FN, 128, "rceil", jnp.float32, (256, 256), Sweep(stages=1, blocks=1)),
        (jfp8.E4M3FN, 32, "rceil", jnp.bfloat16, (128, 256), None),
        (jfp8.E4M3FN, 32, "floor", jnp.float32, (100, 150), None),
        (jfp8.E5M2, 32, "ceil", jnp.float16, (33, 128), Sweep(rows=64, columns=64)),
        (jfp8.E5M2, 32, "even", jnp.bfloat16, (128, 128), None),
        (jfp8.E5M2, 32, None, jnp.float32, (64, 128), Sweep(rows=64)),
    ],
)
def test_quantize_rows_in_blocks(interpreted, fmt, block, rounding, dtype, shape, sweep):
    x = numbers(shape, dtype, (np.nan, np.inf, 60000.0, 1e-7))
    q, s, q_t, s_t = quantize_rows_in_blocks(x, fmt, block, rounding, sweep=sweep)
    want, want_t = blocks_of_both(x, fmt, block, rounding)
    for data, scale, (codes, scales, poisoned) in ((q, s, want), (q_t, s_t, want_t)):
        assert scale.dtype == scales.dtype
        np.testing.assert_array_equal(scale, scales)
        assert_same_codes(data, codes, poisoned)


@pytest.mark.parametrize(
    ("fmt", "rounding", "dtype"),
    [
        (jfp8.E4M3FN, None, jnp.bfloat16),
        (jfp8.E5M2, "power_of_two", jnp.float16),
        (jfp8.E5M2, None, jnp.float32),
    ],
)
def test_quantize_tiles(interpreted, fmt, rounding, dtype):
    x = numbers((200, 384), dtype)
    x = x.at[3, 4].set(jnp.nan).at[150, 200].set(-jnp.inf).at[128:, 256:].set(0)
    q, q_t, s = quantize_tiles(x, fmt, rounding, sweep=Sweep(blocks=4))
    want = jfp8.quantize(x, fmt, granularity=jfp8.Block((128, 128)), scale_rounding=rounding)
    np.testing.assert_array_equal(s, want.scale)
    assert np.isnan(s).sum() == 2
    assert s[1, 2] == 1
    assert_same_codes(q, want.data)
    assert_same_codes(q_t, want.data.T)


def test_huge_and_tiny_blocks(interpreted):
    """Scales at the ends of f32, where neither they nor their reciprocals may be subnormal."""
    x = np.full((128, 128), 1e-30, np.float32)
    x[:32] = 3.4e38
    x[32:64] = 2.0**-126
    x[64:96] = 3e-36  # its quotient by 448 is subnormal
    for fmt in (jfp8.E4M3FN, jfp8.E5M2):
        q, s, *_ = quantize_rows_in_blocks(jnp.asarray(x), fmt, 128, None)
        want = jfp8.quantize(x, fmt, granularity=jfp8.Block((1, 128)))
        np.testing.assert_array_equal(s, want.scale.T)
        assert_same_codes(q, want.data)


@pytest.mark.parametrize("off", range(-3, 4))
def test_nearest_quotient_corrects_an_inexact_division(off):
    """The device divides in about two units in the last place; the interpreter would hide that."""
    rng = np.random.default_rng(1)

    def positive(n):
        bits = rng.integers(64, 190, n) << 23 | rng.integers(0, 1 << 23, n)
        return bits.astype(np.int32).view(np.float32)

    a, b = positive(100_000), positive(100_000)
    b[:30_000], b[30_000:60_000] = 448, 57344
    a[60_000:80_000] = 1  # reciprocals
    a[80_000:80_003] = b[80_000:80_003] * np.array([1, 1 - 2**-24, 1 + 2**-23], np.float32)
    a[80_003:80_100], b[80_003:80_100] = 1, 2.0 ** np.arange(-48, 49)
    exact = (a.astype(np.float64) / b).astype(np.float32)
    nearly = (exact.view(np.int32) + off).view(np.float32)
    np.testing.assert_array_equal(jax.jit(nearest_quotient)(nearly, a, b), exact)
