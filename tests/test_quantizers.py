"""quantize: its bytes and scales held to numpy and ml_dtypes, its error to half a step."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfp8 import (
    E2M1FN,
    E3M4,
    E4M3FN,
    E5M2,
    E8M0FNU,
    Block,
    PerAxis,
    PerTensor,
    ScaledArray,
    cast,
    dequantize,
    quantize,
    round_to_format,
)
from jfp8.quantizers import (
    Blockwise,
    Context,
    Current,
    Delayed,
    Quantizer,
    Rowwise,
    TwoLevel,
    Unit,
    quantize_with_scale,
)
from jfp8.scaling import amax, init_amax_state

DATA_FORMATS = (E4M3FN, E5M2, E2M1FN)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
E8M0_MODES = ("rceil", "floor", "ceil", "even")
GRANULARITIES = (
    PerTensor(),
    PerAxis(0),
    PerAxis(1),
    PerAxis((0, 1)),
    Block((1, 16)),
    Block((2, 8)),
)
FLT_MAX = float(np.finfo(np.float32).max)
KEY = jax.random.key(0)

data_formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
STATIC = ("granularity", "scale_rounding", "rounding")
jit_quantize = jax.jit(quantize, static_argnums=1, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnums=1, static_argnames=STATIC)
def there_and_back(x, fmt, **options):
    q = quantize(x, fmt, **options)
    return q, dequantize(q)


def sample(dtype=jnp.float32, shape=(8, 64)) -> np.ndarray:
    """Several binades, so that rows, columns and blocks differ in amax, and some subnormals."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, shape))
    return x.astype(dtype)


# Oracles.


def blocks_of(granularity, shape) -> tuple[int, ...]:
    """Shape of what shares a scale, from the documentation of the granularities."""
    if granularity == PerTensor():
        return shape
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        kept = {axis % len(shape) for axis in axes}
        return tuple(1 if axis in kept else n for axis, n in enumerate(shape))
    return (1,) * (len(shape) - len(granularity.shape)) + granularity.shape


def padded(x, blocks) -> np.ndarray:
    """`x` with zeros behind it, up to whole blocks."""
    return np.pad(x, [(0, -n % b if b else 0) for n, b in zip(x.shape, blocks)])


def block_amax(x, granularity) -> np.ndarray:
    """One maximum per block; 0-d for PerTensor."""
    a = np.abs(x.astype(np.float32))
    if granularity == PerTensor():
        return np.max(a, initial=0)
    blocks = blocks_of(granularity, a.shape)
    a = padded(a, blocks)
    parts, axes = [], []
    for n, b in zip(a.shape, blocks):
        axes.append(len(parts) + 1)
        parts += [n // b if b else 1, b]
    return np.max(a.reshape(parts), axis=tuple(axes), initial=0)


def spread(scale, shape, block=None) -> np.ndarray:
    """Each element of `scale` repeated over its block of an array of `shape`."""
    scale = np.asarray(scale)
    for axis, m in enumerate(scale.shape):
        n = shape[axis]
        size = block[axis] if block else n // m if m else 1
        scale = np.repeat(scale, size, axis=axis).take(np.arange(n), axis=axis)
    return scale


def expected_scale(x, fmt, granularity) -> np.ndarray:
    a = block_amax(x, granularity)
    scale = np.maximum(a / np.float32(fmt.max), np.float32(2.0**-126))
    bad = np.float32(np.nan if isinstance(granularity, Block) else 1)
    scale = np.where(np.isfinite(a), np.where(a > 0, scale, np.float32(1)), bad)
    return scale.astype(np.float32)


def expected_data(x, fmt, scale, block=None) -> np.ndarray:
    """``cast(x * (1 / scale))`` by numpy and ml_dtypes; NaN where x is not finite."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * (np.float32(1) / spread(scale, x.shape, block))
        scaled = np.where(np.isfinite(x.astype(np.float32)), scaled, np.float32(np.nan))
        return np.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)


def half_step(a, fmt) -> np.ndarray:
    """Half the distance of neighbouring values of `fmt` at magnitude `a` (f64)."""
    exponent = np.floor(np.log2(np.maximum(a, fmt.smallest_normal)))
    return np.exp2(exponent - fmt.mantissa_bits - 1)


def assert_within_half_a_step(x, values, fmt, scale, slack=0.0):
    """The error of one rounding on the scaled grid, and of three f32 operations around it."""
    x, values = np.asarray(x, np.float64), np.asarray(values, np.float64)
    s = np.asarray(spread(scale, x.shape), np.float64)
    bound = half_step(np.abs(x) / s, fmt) * s * (1 + 2.0**-20) + 3 * 2.0**-24 * np.abs(x) + slack
    assert np.all(np.abs(values - x) <= bound)


def codes(data) -> np.ndarray:
    return np.asarray(data).view(np.uint8)


def assert_same_data(actual, expected):
    """Equal codes, but for the payload of NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = [np.isnan(np.asarray(a).astype(np.float32)) for a in (actual, expected)]
    np.testing.assert_array_equal(*nan)
    np.testing.assert_array_equal(codes(actual)[~nan[0]], codes(expected)[~nan[0]])


def assert_bitwise(actual, expected):
    """Equal bits, but for the payload of NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    actual, expected = (np.where(np.isnan(a), np.float32(0), a) for a in (actual, expected))
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def assert_quantized(q, x, fmt, granularity):
    scale = expected_scale(x, fmt, granularity)
    assert_bitwise(q.scale, scale)
    assert_same_data(q.data, expected_data(x, fmt, scale, q.block))


# Scales and data.


@data_formats
@granularities
def test_quantize(fmt, granularity):
    x = sample()
    q, values = there_and_back(x, fmt, granularity=granularity)
    assert_quantized(q, x, fmt, granularity)
    assert_within_half_a_step(x, values, fmt, q.scale)
    assert_bitwise(
        values, expected_data(x, fmt, q.scale).astype(np.float32) * spread(q.scale, x.shape)
    )


@dtypes
@pytest.mark.parametrize("granularity", [PerTensor(), Block((1, 16))], ids=str)
def test_quantize_takes_16_bit_inputs(dtype, granularity):
    """Their values are exact in f32, where everything is computed."""
    x = sample(dtype)
    q, values = there_and_back(x, E5M2, granularity=granularity)
    assert_quantized(q, x, E5M2, granularity)
    assert_within_half_a_step(x, values, E5M2, q.scale)
    assert q.scale.dtype == jnp.float32


@granularities
def test_the_largest_element_of_a_block_becomes_the_largest_value(granularity):
    x = sample()
    data = np.abs(np.asarray(quantize(x, E4M3FN, granularity=granularity).data).astype(np.float32))
    assert np.all(block_amax(data, granularity) == 448)


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=3),
    st.sampled_from(DATA_FORMATS),
)
def test_quantize_any_shape(dimensions, fmt):
    """Sizes with zeros among them, with a block for each dimension, which may be cut short."""
    shape, block = tuple(n for n, _ in dimensions), tuple(b for _, b in dimensions)
    x = sample(shape=shape)
    q, values = there_and_back(x, fmt, granularity=Block(block))
    assert q.scale.shape == tuple(math.ceil(n / b) for n, b in dimensions)
    assert q.block == (block if any(n % b for n, b in dimensions) else None)
    assert_quantized(q, x, fmt, Block(block))
    assert values.shape == q.shape == shape


@pytest.mark.parametrize("granularity", [*GRANULARITIES[:4], Block((1, 2))], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
def test_quantize_of_empty_arrays(granularity, shape):
    q = quantize(np.zeros(shape, np.float32), granularity=granularity)
    assert q.shape == shape
    assert np.all(np.asarray(q.scale) == 1)
    assert q.dequantize().shape == shape


def test_quantize_of_scalars_and_zeros():
    q = quantize(-3.0)
    assert (q.shape, q.scale.shape, float(q.dequantize())) == ((), (), -3.0)
    q = quantize(np.array([0.0, -0.0], np.float32))
    assert float(q.scale) == 1
    assert codes(q.data).tolist() == [0x00, 0x80]


def test_f8_inputs_are_quantized_by_value():
    x = np.array([1.0, -57344.0, 2.0**-16], E5M2.dtype)
    q = quantize(x, E4M3FN)
    assert_quantized(q, x, E4M3FN, PerTensor())
    bad = np.array([1.0, np.nan, np.inf], E5M2.dtype)
    data = np.asarray(quantize(bad, E4M3FN).data).astype(np.float32)
    assert np.isnan(data).tolist() == [False, True, True]


# Rounded scales.


@data_formats
def test_power_of_two_scales_multiply_exactly(fmt):
    """Quantizing is then rounding on a grid, and dequantizing adds no error."""
    x = sample()
    q, values = there_and_back(x, fmt, granularity=Block((1, 16)), scale_rounding="power_of_two")
    scale = np.asarray(q.scale)
    assert q.scale.dtype == jnp.float32
    assert np.all(scale.view(np.uint32) & 0x7FFFFF == 0)
    amax = block_amax(x, Block((1, 16)))
    assert np.all((amax <= scale * fmt.max) & (amax > scale / 2 * fmt.max))
    exact = np.asarray(q.data).astype(np.float64) * spread(scale, x.shape)
    np.testing.assert_array_equal(values, exact)
    on_grid = np.asarray(round_to_format(x / spread(scale, x.shape), fmt)) * spread(scale, x.shape)
    assert_bitwise(values, on_grid)
    _, again = there_and_back(
        values, fmt, granularity=Block((1, 16)), scale_rounding="power_of_two"
    )
    assert_bitwise(again, values)


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN], ids=lambda f: f.name)
@pytest.mark.parametrize("mode", E8M0_MODES)
def test_e8m0_scales(fmt, mode):
    """A power of two next to ``amax / max``; only those that round up keep everything in range."""
    x = sample()
    granularity = Block((1, 32))
    q, values = there_and_back(x, fmt, granularity=granularity, scale_rounding=mode)
    assert q.scale.dtype == E8M0FNU.dtype
    scale = np.asarray(q.scale).astype(np.float32)
    amax = block_amax(x, granularity)
    emax = np.floor(np.log2(fmt.max))
    log2 = np.log2(amax.astype(np.float64))
    rounded = amax.astype(np.float64) + np.exp2(np.floor(log2) - fmt.mantissa_bits - 1)
    exponent = {
        "rceil": np.ceil(np.log2(amax / fmt.max)),
        "floor": np.floor(log2) - emax,
        "ceil": np.ceil(log2) - emax,
        "even": np.floor(np.log2(rounded)) - emax,
    }[mode]
    np.testing.assert_array_equal(scale, np.exp2(exponent))
    assert_same_data(q.data, expected_data(x, fmt, scale))
    saturated = np.abs(x) > spread(scale, x.shape) * fmt.max
    assert not (np.any(saturated) and mode in ("rceil", "ceil"))
    assert np.any(saturated) or mode != "floor"
    for_bound = np.where(saturated, np.float32(1), x)
    kept = np.where(saturated, np.float32(1), values)
    assert_within_half_a_step(for_bound, kept, fmt, scale)


@data_formats
def test_trap_zero_blocks_get_the_smallest_scale(fmt):
    """Code 0 is 2^-127, an f32 subnormal: a division by it gave NaN or Inf."""
    x = sample(shape=(2, 64))
    x[0, :32] = 0
    q, values = there_and_back(x, fmt, granularity=Block((1, 32)), scale_rounding="rceil")
    assert codes(q.scale)[0, 0] == 0
    assert np.all(np.asarray(values)[0, :32] == 0)
    assert np.all(np.asarray(values)[1] != 0) or fmt is E2M1FN
    assert np.all(np.isfinite(values))


@data_formats
def test_trap_extreme_e8m0_scales_quantize_exactly(fmt):
    """Every code but NaN as a given scale; the reciprocal of 254, 2^-127, is not a normal f32."""
    c = np.arange(255)
    multiple = np.where(c < 252, 6.0, 1.5)
    x = np.ldexp(multiple, c - 127).astype(np.float32)
    q = quantize(x, fmt, scale=jnp.asarray(c.astype(np.uint8).view(E8M0FNU.dtype)))
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float64), multiple)
    assert_bitwise(q.dequantize(), x)


@pytest.mark.parametrize("code", [0, 253, 254])
def test_trap_constant_factors_are_multiplied_first(code):
    """XLA turns ``(x * 2^-63) * 2^-64`` into ``x * 2^-127``, and so into zero, if it knows both."""
    scale = jnp.asarray(np.array(code, np.uint8).view(E8M0FNU.dtype))
    x = np.ldexp([1.5, -1.75, 1.0 if code else 2.0], max(code, 1) - 127).astype(np.float32)
    q = jax.jit(lambda x: quantize(x, scale=scale))(x)
    exact = x.astype(np.float64) * 2.0 ** (127 - code)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float64), exact)


@pytest.mark.parametrize("scale_rounding", [None, "power_of_two"])
@data_formats
def test_trap_extreme_magnitudes(fmt, scale_rounding):
    """Per row one magnitude from f32's subnormals to its maximum: no NaN, no Inf, no lost array.

    XLA:CPU takes f32 subnormals, that is everything below 2^-126, for zero.
    """
    top = FLT_MAX if scale_rounding is None else 2.0**127  # what is above may round to 2^128
    tops = np.append(np.geomspace(1e-44, 1e38, 200), top)
    x = (tops[:, None] * np.linspace(-1, 1, 24)).astype(np.float32)
    q, values = there_and_back(x, fmt, granularity=PerAxis(0), scale_rounding=scale_rounding)
    scale = np.asarray(q.scale)
    assert np.all((scale >= 2.0**-126) & (scale <= 2.0**126))
    assert np.all(np.isfinite(values))
    assert_within_half_a_step(x, values, fmt, scale, slack=2 * 2.0**-126)


# What does not fit, and what is no number.


@data_formats
def test_given_scales_saturate_what_is_beyond(fmt):
    x = np.array([1.0, 2.9, 3.1, 1e5, 1e30, FLT_MAX], np.float32)
    x = np.concatenate([x, -x])
    scale = np.float32(3 / fmt.max)
    q = quantize(x, fmt, scale=scale)
    assert_bitwise(q.scale, scale)
    assert_same_data(q.data, expected_data(x, fmt, scale))
    data = np.asarray(q.data).astype(np.float32)
    assert np.all(np.abs(data[[2, 3, 4, 5]]) == fmt.max)
    tiny = quantize(x, fmt, scale=2.0**-100)  # where x / scale overflows f32
    np.testing.assert_array_equal(np.asarray(tiny.data).astype(np.float32), np.sign(x) * fmt.max)


@pytest.mark.parametrize("scale_shape", [(), (1, 1), (8, 1), (1, 64), (4, 16), (8, 64)], ids=str)
def test_given_scales_of_every_layout(scale_shape):
    scale = np.random.default_rng(3).uniform(0.01, 0.1, scale_shape).astype(np.float32)
    x = sample()
    q = quantize(x, E4M3FN, scale=scale)
    assert_bitwise(q.scale, scale)
    assert_same_data(q.data, expected_data(x, E4M3FN, scale))


@pytest.mark.parametrize("scale", [0.25, np.float64(0.25), np.array(0.25, np.float16)], ids=repr)
def test_given_scales_are_kept_in_f32(scale):
    q = quantize(np.array([1.0, 3.0], np.float32), scale=scale)
    assert_bitwise(q.scale, np.float32(0.25))
    assert np.asarray(q.data).astype(np.float32).tolist() == [4, 12]


@pytest.mark.parametrize("scale", [None, np.float32(0.125)], ids=["current", "given"])
@pytest.mark.parametrize(
    ("fmt", "dtype", "granularity"),
    [(E4M3FN, dtype, PerTensor()) for dtype in DTYPES]
    + [(E5M2, jnp.float32, g) for g in (PerTensor(), PerAxis(0), Block((1, 16)))],
    ids=lambda v: getattr(v, "__name__", None) or str(v),
)
def test_trap_nan_and_inf_do_not_vanish(fmt, scale, dtype, granularity):
    """Casts in hardware saturate Inf, and some turn NaN into the largest value too."""
    x = sample(dtype)
    x[0, 3], x[2, 60], x[5, 0] = np.nan, np.inf, -np.inf
    q, values = there_and_back(x, fmt, granularity=granularity, scale=scale)
    used = expected_scale(x, fmt, granularity) if scale is None else scale
    assert_bitwise(q.scale, used)
    assert_same_data(q.data, expected_data(x, fmt, used))
    lost = ~np.isfinite(x.astype(np.float32))
    if isinstance(granularity, Block) and scale is None:  # with all that shares a scale with them
        lost = spread(block_amax(lost, granularity) > 0, x.shape)
    np.testing.assert_array_equal(np.isnan(values), lost)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale_rounding", [None, "power_of_two", "rceil"])
@pytest.mark.parametrize("block", [(1, 32), (32, 1), (16, 16), (128, 128)], ids=str)
def test_trap_nan_spoils_its_block_and_no_other(block, scale_rounding, bad):
    """The rest of the array is as if it were not there, to the bit; the last block is short."""
    x = sample(shape=(48, 80))
    options = {"granularity": Block(block), "scale_rounding": scale_rounding}
    clean, clean_values = there_and_back(x, E4M3FN, **options)
    x[33, 65] = bad
    q, values = there_and_back(x, E4M3FN, **options)
    here = np.zeros(q.scale.shape, bool)
    here[33 // block[0], 65 // block[1]] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(q.scale).astype(np.float32)), here)
    lost = spread(here, x.shape, block)
    assert lost.sum() <= math.prod(block)
    np.testing.assert_array_equal(np.isnan(np.asarray(q.data).astype(np.float32)), lost)
    np.testing.assert_array_equal(np.isnan(values), lost)
    np.testing.assert_array_equal(codes(q.data)[~lost], codes(clean.data)[~lost])
    assert_bitwise(np.asarray(values)[~lost], np.asarray(clean_values)[~lost])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale_rounding", [None, "power_of_two", *E8M0_MODES])
def test_e2m1_keeps_nan_in_the_scale(bad, scale_rounding):
    """It has no code for it: the whole block becomes NaN, and no other."""
    x = sample()
    x[2, 20] = bad
    q, values = there_and_back(x, E2M1FN, granularity=Block((1, 16)), scale_rounding=scale_rounding)
    expected = np.zeros(x.shape, bool)
    expected[2, 16:32] = True
    np.testing.assert_array_equal(np.isnan(values), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("mode", E8M0_MODES)
def test_mx_blocks_with_nan_become_nan(bad, mode):
    """By the OCP specification; the other blocks are as if it were not there."""
    x = sample()
    q_clean = jit_quantize(x, E4M3FN, granularity=Block((1, 32)), scale_rounding=mode)
    x[3, 40] = bad
    q, values = there_and_back(x, E4M3FN, granularity=Block((1, 32)), scale_rounding=mode)
    where = np.zeros((8, 2), bool)
    where[3, 1] = True
    np.testing.assert_array_equal(codes(q.scale) == 255, where)
    np.testing.assert_array_equal(np.isnan(values), spread(where, x.shape))
    elsewhere = ~spread(where, x.shape)
    np.testing.assert_array_equal(codes(q.data)[elsewhere], codes(q_clean.data)[elsewhere])


# Rounding modes.


def test_toward_zero_never_grows():
    x = sample()
    q, values = there_and_back(x, E4M3FN, scale_rounding="power_of_two", rounding="toward_zero")
    values = np.asarray(values)
    assert np.all(np.abs(values) <= np.abs(x))
    assert np.all(np.sign(values) * np.sign(x) >= 0)
    assert np.all(np.abs(values - x) <= 2 * half_step(np.abs(x) / q.scale, E4M3FN) * q.scale)
    assert np.any(values != np.asarray(quantize(x, scale_rounding="power_of_two").dequantize()))


def test_stochastic_quantization_is_unbiased():
    x = sample(shape=(64, 512))
    options = {"scale_rounding": "power_of_two", "rounding": "stochastic"}
    q, values = there_and_back(x, E4M3FN, key=KEY, **options)
    _, again = there_and_back(x, E4M3FN, key=KEY, **options)
    _, other = there_and_back(x, E4M3FN, key=jax.random.key(1), **options)
    assert_bitwise(values, again)
    assert 0.1 < np.mean(np.asarray(values) != np.asarray(other)) < 0.5
    step = 2 * half_step(np.abs(x).astype(np.float64) / q.scale, E4M3FN) * q.scale
    remainder = np.asarray(np.abs(x) % step / step, np.float64)
    error = np.asarray(values, np.float64) - x
    assert np.all(np.abs(error) <= step)
    sigma = np.sqrt(np.sum(remainder * (1 - remainder) * np.square(step)))
    assert abs(np.sum(error)) < 4 * sigma


# Transformations.


@pytest.mark.parametrize(
    ("granularity", "scale_rounding"),
    [(PerTensor(), None), (PerAxis(0), None), (Block((1, 16)), "rceil")],
    ids=str,
)
def test_vmap_quantizes_each_as_if_it_were_alone(granularity, scale_rounding):
    """Bit for bit, which a division that XLA rewrites for broadcast operands would not be."""
    x = sample(shape=(5, 4, 32))
    x *= np.array([1.0, 1.1, 1.3, 1.7, 0.9], np.float32)[:, None, None]

    def each(x):
        q = quantize(x, granularity=granularity, scale_rounding=scale_rounding)
        return q.data, q.scale.astype(jnp.float32)

    alone = [np.stack(a) for a in zip(*map(jax.jit(each), x), strict=True)]
    for mapped in (jax.vmap(each)(x), jax.jit(jax.vmap(each))(x)):
        assert_same_data(mapped[0], alone[0])
        assert_bitwise(mapped[1], alone[1])
    values = jax.vmap(dequantize)(ScaledArray(*mapped))
    assert_bitwise(values, [dequantize(ScaledArray(*q)) for q in zip(*mapped)])


@granularities
def test_eager_agrees_with_jit(granularity):
    x = sample()
    eager, jitted = quantize(x, granularity=granularity), jit_quantize(x, granularity=granularity)
    assert_same_data(eager.data, jitted.data)
    assert_bitwise(eager.scale, jitted.scale)
    assert_bitwise(eager.dequantize(), jitted.dequantize())


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), Block((1, 16))], ids=str)
def test_sharding_changes_nothing(granularity):
    """The amax is that of the whole array, and only amaxes travel."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    x = sample(shape=(16, 64))
    sharding = NamedSharding(mesh, P("x"))
    sharded = jax.device_put(x, sharding)
    q, expected = (
        jit_quantize(sharded, granularity=granularity),
        quantize(x, granularity=granularity),
    )
    assert_same_data(q.data, expected.data)
    assert_bitwise(q.scale, expected.scale)
    assert_bitwise(dequantize(q), dequantize(expected))
    assert q.data.sharding.is_equivalent_to(sharding, 2)
    program = jit_quantize.lower(sharded, granularity=granularity).compile().as_text()
    assert "all-gather" not in program
    assert ("all-reduce" in program) == (not isinstance(granularity, Block))


# Gradients.


@data_formats
@pytest.mark.parametrize("granularity", [PerTensor(), Block((2, 8))], ids=str)
def test_gradient_is_straight_through(fmt, granularity):
    """Of representable cotangents exactly, and of a sum all ones; the scale passes none on."""
    x = sample(shape=(4, 16))
    w = np.resize(np.array([1, -0.5, 2, -4, 6, 3], np.float32), x.shape)

    def loss(x, w):
        return jnp.vdot(w, dequantize(quantize(x, fmt, granularity=granularity)))

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_array_equal(gradient(x, np.ones_like(x)), np.ones_like(x))
    np.testing.assert_array_equal(gradient(x, w), w)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(np.stack([x, 2 * x]), np.stack([w, w]))
    np.testing.assert_array_equal(mapped, np.stack([w, w]))


@dtypes
def test_gradient_has_the_dtype_of_the_input(dtype):
    x = sample(dtype, (8,))
    gradient = jax.jit(jax.grad(lambda x: dequantize(quantize(x)).sum()))(x)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [1] * 8


@pytest.mark.parametrize("scale", [None, 0.5])
def test_gradient_passes_where_the_value_does_not(scale):
    @jax.jit
    @jax.grad
    def gradient(x):
        return dequantize(quantize(x, scale=scale))[::2].sum()

    for bad in (np.nan, np.inf, 1e30):
        assert gradient(np.array([1.0, 2.0, bad, -2.0], np.float32)).tolist() == [1, 0, 1, 0]


def test_scales_have_no_gradient():
    """Neither a given one, through the values or by itself, nor the one that follows from x."""
    x, scale = np.array([1.0, -2.0], np.float32), np.float32(0.5)

    def both(x, scale):
        q = quantize(x, scale=scale)
        return dequantize(q).sum() + q.scale + quantize(x).scale

    d_x, d_scale = jax.jit(jax.grad(both, argnums=(0, 1)))(x, scale)
    assert d_x.tolist() == [1, 1]
    assert float(d_scale) == 0


def test_jvp_of_quantize_rounds_the_tangent():
    x, dx = jnp.array([1.0, 7.0, -3.0]), jnp.array([0.3, -2.0, 1.0])
    q, tangent = jax.jvp(quantize, (x,), (dx,))
    assert_same_data(q.data, quantize(x).data)
    assert np.asarray(tangent.data).astype(np.float32).tolist() == [0.3125, -2, 1]
    assert float(tangent.scale) == 0


# The quantizers of recipes.


X = sample(shape=(4, 16))
AMAX = np.max(np.abs(X))


def state_of(*history, running=0.0):
    state = {"amax_history": np.float32(history), "amax": np.float32(running)}
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, init_amax_state(len(history)))
    return state


def assert_scaled_for(q, fmt, amax):
    scale = np.float32(amax) / np.float32(fmt.max)
    assert_bitwise(q.scale, scale)
    assert_same_data(q.data, expected_data(X, fmt, scale))


@functools.partial(jax.jit, static_argnames=("quantizer", "contracting"))
def call(quantizer, x, observed=None, state=None, contracting=(1,), seed=None):
    observed = amax(x) if observed is None else jnp.asarray(observed)
    return quantizer(x, Context(contracting, observed, state, seed))


@data_formats
def test_current_uses_the_amax_at_hand(fmt):
    for state in (None, state_of(7.0, 8.0)):
        assert_scaled_for(call(Current(fmt), X, AMAX, state), fmt, AMAX)
    rounded = call(Current(fmt, "power_of_two"), X, AMAX)
    assert_same_data(rounded.data, jit_quantize(X, fmt, scale_rounding="power_of_two").data)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("options", "state", "amax"),
    [
        pytest.param({}, None, AMAX, id="no state"),
        pytest.param({}, state_of(0, 0), AMAX, id="empty"),
        pytest.param({}, state_of(0, 0, running=2 * AMAX), 2 * AMAX, id="empty, larger before"),
        pytest.param({}, state_of(0, 0, running=AMAX / 2), AMAX, id="empty, smaller before"),
        pytest.param({}, state_of(2, 5, 3), 5, id="maximum"),
        pytest.param({}, state_of(2, 5, 3, running=9), 5, id="not this step"),
        pytest.param({"algo": "most_recent"}, state_of(2, 5, 3), 2, id="most recent"),
        pytest.param({"algo": "most_recent"}, state_of(0, 0), AMAX, id="most recent, empty"),
        pytest.param({"margin": 2}, state_of(2, 5, 3), 20, id="margin"),
        pytest.param({"margin": 1}, None, 2 * AMAX, id="margin, no state"),
    ],
)
def test_delayed_uses_the_history(fmt, options, state, amax):
    """An empty one predicts nothing; then it is the current amax, so step 0 is not lost."""
    assert_scaled_for(call(Delayed(fmt, **options), X, AMAX, state), fmt, amax)


def test_delayed_rounds_its_scale():
    q = call(Delayed(E4M3FN, scale_rounding="power_of_two"), X, AMAX, state_of(449.0))
    assert float(q.scale) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_delayed_shows_what_is_not_finite(bad):
    x = X.copy()
    x[1, 2] = bad
    for state, scale in ((state_of(5.0), 5 / np.float32(448)), (state_of(0.0), np.float32(1))):
        q = call(Delayed(E4M3FN), x, np.float32(bad), state)
        assert_bitwise(q.scale, scale)
        assert np.argwhere(np.isnan(np.asarray(dequantize(q)))).tolist() == [[1, 2]]


@data_formats
def test_unit_scales_by_one(fmt):
    q = call(Unit(fmt), X, AMAX, state_of(7.0))
    assert_bitwise(q.scale, np.float32(1))
    assert_same_data(q.data, expected_data(X, fmt, np.float32(1)))


def test_quantizers_are_values():
    assert Current(E4M3FN) == Current(E4M3FN) != Current(E5M2)
    assert Delayed(E4M3FN, margin=1) != Delayed(E4M3FN)
    assert len({Delayed(E4M3FN), Delayed(E4M3FN), Unit(E4M3FN), Current(E4M3FN)}) == 3
    assert {q.fmt for q in (Current(E5M2), Delayed(E5M2), Unit(E5M2))} == {E5M2}


# Errors.


@pytest.mark.parametrize(
    ("x", "dtype"), [(np.arange(3), "int32"), (1j * np.ones(3), "complex64"), (True, "bool")]
)
def test_errors_name_the_dtype(x, dtype):
    with pytest.raises(TypeError, match=rf"dtype {dtype}.*floating"):
        quantize(x)


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64.*rounded twice"):
        quantize(jnp.ones(3, jnp.float64))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fmt": E8M0FNU}, TypeError, "E8M0FNU has no sign and no zero: it holds scales"),
        ({"fmt": "E4M3FN"}, TypeError, r"fmt must be a jfp8\.Format.*'E4M3FN'"),
        ({"rounding": "up"}, ValueError, "'up' is unknown.*nearest_even, toward_zero"),
        ({"rounding": "stochastic"}, ValueError, r"key is None.*jax\.random\.key"),
        ({"scale_rounding": "up"}, ValueError, "'up' is unknown.*'power_of_two', 'rceil'"),
        ({"scale": 2.0, "scale_rounding": "floor"}, ValueError, "scale= was given.*one of the two"),
        ({"scale": np.int32(2)}, TypeError, "scale must be floating, got dtype int32"),
        ({"scale": np.ones(3, np.float32)}, ValueError, r"shape \(4, 6\).*scale of shape \(3,\)"),
        ({"scale": np.ones((4, 4), np.float32)}, ValueError, r"scale of shape \(4, 4\)"),
        ({"granularity": "row"}, TypeError, r"PerTensor\(\), PerAxis\(axis\) or Block.*'row'"),
        ({"granularity": PerAxis(2)}, ValueError, r"PerAxis\(axis=2\).*\(4, 6\).*-2 to 1"),
        ({"granularity": Block((1, 1, 4))}, ValueError, r"Block\(shape=\(1, 1, 4\)\).*only 2"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        quantize(np.ones((4, 6), np.float32), **options)


def test_a_scaled_array_is_returned():
    assert type(quantize(np.ones(3, np.float32))) is ScaledArray
