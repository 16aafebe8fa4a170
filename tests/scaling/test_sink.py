"""The sink: an amax survives whatever JAX does to a cotangent, exactly or as a close bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfp8.scaling.sink import WIDTH, decode_amax, encode_amax, max_of_sinks

TINY = np.float32(2.0**-126)  # the smallest normal number
LARGEST = np.finfo(np.float32).max
SMALLEST = np.float32(1.5 * TINY)  # below it normal numbers share a bin

drawn = settings(max_examples=60, deadline=None, derandomize=True, database=None)

encode_all = jax.jit(jnp.vectorize(encode_amax, signature="()->(w)"))
decode = jax.jit(decode_amax)
larger_of = jax.jit(max_of_sinks)


def encode(values):
    """Rows of the sink as numpy, one for each of `values`, of which 16 are padded and compiled."""
    values = np.asarray(values, np.float32)
    if values.ndim == 1 and values.size < 16:
        padded = np.zeros(16, np.float32)
        padded[: values.size] = values
        return np.asarray(encode_all(padded))[: values.size]
    return np.asarray(encode_all(values))


def read(row):
    """amax and overflow of one row."""
    amax, overflow = decode(row)
    return float(amax), bool(overflow)


normal_floats = st.floats(float(SMALLEST), float(LARGEST), width=32, allow_subnormal=False)


@st.composite
def close_floats(draw, most):
    """A few amaxes within some octaves of each other, now and then within a bin."""
    center = draw(st.floats(2.0**-100, 2.0**100, width=32))
    spread = draw(st.sampled_from([8.0, 2.0, 1.1, 1.01, 1.001]))
    factors = draw(st.lists(st.floats(1 / spread, spread), min_size=2, max_size=most))
    return [float(np.float32(center * f)) for f in factors]


def test_single_use_is_exact_in_every_binade():
    """Both ends of every bin, of every power of two from 2^-126 to the largest number."""
    exponents = np.arange(1, 255, dtype=np.uint32)[:, None] << 23
    eighth = 1 << 20
    mantissas = np.array([0, 1, 12345, *(k * eighth - d for k in range(1, 9) for d in (1, 0))])
    mantissas = np.append(mantissas[mantissas < 1 << 23], 0x5A5A5A).astype(np.uint32)
    values = (exponents | mantissas).view(np.float32).ravel()
    assert values.min() == TINY
    assert values.max() == LARGEST
    values = values[values >= SMALLEST]
    amax, overflow = decode(encode(values))
    np.testing.assert_array_equal(amax, values)
    assert not overflow.any()


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 2.0**-127, np.nextafter(TINY, np.float32(0))])
def test_zero_and_subnormal_are_zero(value):
    """Arithmetic on XLA:CPU flushes subnormals, so as an amax they are none."""
    assert read(encode([value])[0]) == (0.0, False)
    assert read(encode([value, 3.0]).sum(0)) == (3.0, False)


@pytest.mark.parametrize("mantissa", [0, 1, 0x155555, 0x3FFFFF])
def test_the_smallest_numbers_are_not_read_as_less(mantissa):
    value = float(np.uint32(1 << 23 | mantissa).view(np.float32))
    amax, overflow = read(encode([value])[0])
    assert max(value, 1.5 * 2.0**-126) <= amax <= 1.625 * value
    assert not overflow


# Combinations: what sums over uses and devices, means and rescalings leave


def assert_bounds(row, values):
    """Not below the exact maximum, and at most 9/8 of it."""
    amax, overflow = read(row)
    largest = max(values)
    assert not overflow
    assert largest <= amax <= min(largest * 9 / 8, float(LARGEST))


@pytest.mark.parametrize("values", [(4.1, 7.9), (4.05, 4.45), (7.9, 4.1, 4.1, 4.1), (1.0, 1.12)])
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_trap_mean_of_one_binade(values, how):
    """The mean of {4.1, 7.9} has the mass of a single use, all in one binade, and once read 6.0."""
    rows = encode(values)
    amax, _ = read(rows.mean(0) if how == "mean" else rows.sum(0))
    assert max(values) <= amax <= max(values) * 9 / 8


def test_trap_one_large_among_ten_million_in_bf16():
    """The one first, in a sum in bf16, which stops at 256 times what it adds, and divides."""
    one, other = (jnp.asarray(row, jnp.bfloat16) for row in encode([1.03, 1.12]))
    add = lambda _, total: total + one
    total = jax.lax.fori_loop(0, 10_000, add, 1e-3 * other)
    for row in (total, total / 10_000_000, (other + 1e7 * one) / 1e7):
        assert row.dtype == jnp.bfloat16
        assert_bounds(row.astype(jnp.float32), [1.03, float(np.float32(1.12))])


@drawn
@given(
    values=close_floats(most=8) | st.lists(normal_floats, min_size=2, max_size=8),
    weights=st.lists(st.floats(-105, 120), min_size=8, max_size=8),
    sign=st.sampled_from([1, -1]),
    seed=st.integers(0, 1 << 32),
)
def test_any_weights_in_any_order_bound_the_maximum(values, weights, sign, seed):
    """Amaxes of other binades, weights from 2^-20 to where f32 ends, and a sum that is Inf."""
    rows = encode(values) * np.float32(2.0**-20)
    weighted = rows * np.exp2(np.float32(weights[: len(values)]))[:, None]
    total = np.zeros(WIDTH, np.float32)
    for i in np.random.default_rng(seed).permutation(len(values)):
        total = total + sign * weighted[i]
    assert_bounds(total, values)


@pytest.mark.parametrize(
    ("dtype", "weight", "lost"),
    [
        (jnp.float32, 2.0**-126, False),
        (jnp.float32, 2.0**-127, True),
        (jnp.bfloat16, 2.0**-126, False),
        (jnp.float16, 2.0**-24, False),
        (jnp.float16, 2.0**-26, True),
    ],
    ids=str,
)
def test_what_a_dtype_flushes_is_lost(dtype, weight, lost):
    """The limit of the promise: 0 is nothing seen, so that no history gets an entry."""
    narrow = (jnp.asarray(encode([3.0])[0]) * np.float32(weight)).astype(dtype)
    assert read(narrow.astype(jnp.float32)) == (0.0 if lost else 3.0, False)


@drawn
@given(normal_floats, st.floats(2.0**-60, 2.0**60))
def test_equal_amaxes_stay_exact(value, factor):
    """A weight that two products share; averages over micro-batches and tokens, a loss scale."""
    row = encode([value])[0]
    assert read((row + row) * np.float32(factor)) == (value, False)


def test_largest_number_is_bounded_by_itself():
    """The upper edge of the last finite bin would be Inf."""
    assert read(encode([LARGEST, 1.0]).sum(0)) == (float(LARGEST), False)
    assert read(encode([LARGEST])[0]) == (float(LARGEST), False)


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.nan])
def test_overflow_is_flagged(bad):
    assert read(encode([bad])[0]) == (0.0, True)


@pytest.mark.parametrize("factor", [np.inf, -np.inf, np.nan])
def test_trap_what_is_multiplied_by_nan_is_an_overflow(factor):
    """As by a clip whose norm is NaN: it was read as 3.4e38, which a history then kept."""
    amax, overflow = read(jnp.asarray(encode([5.0])[0]) * factor)
    assert overflow
    assert amax in (0.0, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@drawn
@given(values=close_floats(most=6), position=st.integers(0, 5), n=st.sampled_from([1, 4, 65536]))
def test_overflow_hides_no_finite_maximum(bad, values, position, n):
    mixed = list(values)
    mixed.insert(position, bad)
    amax, overflow = read(encode(mixed).sum(0) / np.float32(n))
    assert overflow
    assert max(values) <= amax <= max(values) * 9 / 8


def sink_of(lhs, rhs, grad):
    return encode([lhs, rhs, grad])


def test_max_of_sinks_is_exact():
    first, second = sink_of(4.1, 1e-20, 3.0), sink_of(7.9, 1e-21, 3.0)
    for row in (larger_of(first, second), larger_of(second, first)):
        amax, overflow = decode(row)
        np.testing.assert_array_equal(amax, np.float32([7.9, 1e-20, 3.0]))
        assert not overflow.any()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_max_of_sinks_keeps_overflow(bad):
    """And beside it the finite maximum, whichever of the two held it."""
    for first, second in (((bad, 5.0, bad), (5.0, bad, 0.0)), ((5.0, bad, 0.0), (bad, 5.0, bad))):
        combined = larger_of(sink_of(*first), sink_of(*second))
        again = larger_of(combined, sink_of(1.0, 1.0, 1.0))
        amax, overflow = (np.asarray(part) for part in decode(again))
        assert overflow.all()
        np.testing.assert_array_equal(amax[:2], 5.0)
        assert 1.0 <= amax[2] <= 9 / 8


def test_max_of_sinks_does_not_grow_with_repetition():
    """A bound stays what it is: the accumulation over many micro-batches adds no headroom."""
    row = sink_of(4.1, 4.1, 4.1) + sink_of(7.9, 7.9, 7.9)
    bound = np.asarray(decode(row)[0])
    total = row
    for _ in range(10):
        total = np.asarray(larger_of(total, row))
    np.testing.assert_array_equal(decode(total)[0], bound)
