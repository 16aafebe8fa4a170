"""Casts by the laws of rounding: every input of 16 bits, every exponent of f32, every random word.

The oracle is integers: an f32 is ``M * 2^E``, and the bits that are cut off from ``M`` decide, so
that the probability of a stochastic rounding is known exactly, too.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, cast, round_to_format
from jfp8.scaling.codes import encode, hardware_converts
from jfp8.scaling.random_bits import random_bits
from support.arrays import assert_same, codes, values_of
from support.devices import traced_for

FORMATS = (E4M3FN, E5M2, E3M4, E2M1FN, E8M0FNU)
ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
KEY = jax.random.key(0)

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
roundings = pytest.mark.parametrize("rounding", ROUNDINGS)
dtypes = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: np.dtype(dtype).name
)

jit_cast = jax.jit(cast, static_argnums=1, static_argnames="rounding")
jit_round = jax.jit(round_to_format, static_argnums=1, static_argnames="rounding")
jit_encode = jax.jit(encode, static_argnums=(1, 2))


# The oracle, in integers


def as_f32(x) -> np.ndarray:
    with np.errstate(all="ignore"):  # signalling NaNs
        return np.asarray(x).astype(np.float32)


def rounded(x, fmt, rounding, words=None) -> np.ndarray:
    """The codes of `x`: ``|x| = M * 2^E`` in steps of ``2^q``, and the remainder of the division.

    ``q = max(floor(log2 |x|) - m, e_min - m)``. A stochastic rounding goes up if the first `n` bits
    of the remainder and the `n` low bits of the word carry, where ``n = 23 - m`` are the bits that
    f32 has more than the format.
    """
    x = as_f32(x)
    pattern = x.view(np.uint32).astype(np.int64)
    field, sign = pattern >> 23 & 0xFF, pattern >> 31
    M = (pattern & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0)
    E = np.maximum(field, 1) - 150
    e = E + np.frexp(M.astype(np.float64))[1] - 1  # floor(log2 |x|), anything of zero
    m, e_min = fmt.mantissa_bits, fmt.min_exponent
    binade = np.maximum(e, e_min)
    cut = np.minimum(binade - m - E, 62)
    assert np.all(cut > 0)
    k, remainder = M >> cut, M & ((1 << cut) - 1)
    code = (binade - e_min << m) + k
    if not fmt.signed:  # no subnormals: the code of 2^e_min is 0, not 1
        code -= 1
    if rounding == "nearest_even":
        tie = (code & 1 == 1) | (not fmt.signed)  # E8M0's go up
        up = (2 * remainder > 1 << cut) | ((2 * remainder == 1 << cut) & tie)
    elif rounding == "toward_zero":
        up = np.zeros(x.shape, bool)
    else:
        first_bits = remainder * draws(fmt) >> cut
        up = first_bits + (words & (draws(fmt) - 1)) >= draws(fmt)
    code = np.clip(code + up, 0, fmt.max_code)
    if not fmt.signed:
        code = np.where(k == 0, 0, code)
        return np.where(np.isnan(x) | (x < 0), 255, code).astype(np.uint8)
    return (np.where(np.isnan(x), fmt.nan_code, code) ^ sign << fmt.bits - 1).astype(np.uint8)


def draws(fmt) -> int:
    """How many words of random bits make a difference."""
    return 1 << 23 - fmt.mantissa_bits


def assert_codes(actual, expected, x, fmt):
    """Equal codes; of NaN the sign and the payload are open."""
    nan = np.isnan(as_f32(x)) & fmt.has_nan
    wrong = np.where(nan, np.isnan(values_of(actual, fmt)) == 0, codes(actual) != expected)
    at = np.argwhere(wrong)
    assert not at.size, (
        f"{len(at)} of {wrong.size} wrong, first {np.asarray(x)[tuple(at[0])]!r}: "
        f"code {codes(actual)[tuple(at[0])]:#x} instead of {expected[tuple(at[0])]:#x}"
    )


def every_pattern(dtype) -> np.ndarray:
    return np.arange(2**16).astype(np.uint16).view(dtype)


def near_ties() -> np.ndarray:
    """f32 of every exponent and sign, every mantissa of 6 bits, and two ulp to either side."""
    mantissas = (np.arange(64)[:, None] << 17) + np.arange(-2, 3)
    pattern = (np.arange(256)[:, None] << 23) + (mantissas.ravel() & 0x7FFFFF)
    return np.concatenate([pattern, pattern | 1 << 31]).ravel().astype(np.uint32).view(np.float32)


def sample(dtype) -> np.ndarray:
    """All patterns of 16 bits, or `near_ties`."""
    return near_ties() if dtype == jnp.float32 else every_pattern(dtype)


def test_the_oracle_is_ml_dtypes():
    """Of the clipped input, and E8M0's but for a known defect below 1.5 * 2^-127."""
    x = near_ties()
    for fmt in (E4M3FN, E5M2, E2M1FN):
        with np.errstate(invalid="ignore"):
            theirs = np.clip(x, -fmt.max, fmt.max).astype(fmt.dtype)
        assert_codes(theirs, rounded(x, fmt, "nearest_even"), x, fmt)
    x = x[(x >= 2.0**-126) & (x <= 2.0**127)]
    theirs = x.astype(ml_dtypes.float8_e8m0fnu)
    assert_codes(theirs, rounded(x, E8M0FNU, "nearest_even"), x, E8M0FNU)


@formats
@dtypes
def test_the_chance_of_rounding_up_is_the_remainder(fmt, dtype):
    """``low + P(up) * (high - low) = x`` for every input: exactly, of subnormals to 2^-n of a step.

    Of the 2^n words, ``P(up) * 2^n`` go up. Which, is tried with the first and the last of both
    kinds and with others. The bits above those that count are set at random.
    """
    x = sample(dtype)
    inside = np.isfinite(as_f32(x)) & (np.abs(as_f32(x)) < fmt.max)
    x = x[inside & (as_f32(x) >= 0 if not fmt.signed else True)]
    a, last = np.abs(as_f32(x).astype(np.float64)), draws(fmt) - 1
    table = values_of(np.arange(fmt.max_code + 1).astype(np.uint8).view(fmt.dtype), fmt)
    down = np.maximum(np.searchsorted(table, a, side="right") - 1, 0)  # E8M0 has no zero
    chance = (a - table[down]) / (table[down + 1] - table[down])
    ups = np.floor(np.maximum(chance, 0) * draws(fmt))
    assert np.all((ups == chance * draws(fmt)) | (a < fmt.smallest_normal))
    assert np.mean(ups > 0) > 0.01
    rng = np.random.default_rng(0)
    sign = np.signbit(as_f32(x)).astype(int) << fmt.bits - 1 if fmt.signed else 0
    for word in (0, last, last - ups, draws(fmt) - ups, rng.integers(0, last, x.size)):
        word = np.clip(word, 0, last).astype(np.int64)
        noise = rng.integers(0, 2**32 // draws(fmt), x.size) * draws(fmt)
        drawn = jit_encode(x, fmt, "stochastic", (word + noise).astype(np.uint32))
        np.testing.assert_array_equal(drawn, down + (word >= draws(fmt) - ups) | sign)


@formats
@dtypes
@roundings
def test_casts_round_as_they_are_told(fmt, dtype, rounding):
    """A stochastic cast by the words of its key. `round_to_format` gives the values, or NaN."""
    x, words = sample(dtype), None
    if rounding == "stochastic":
        words = np.asarray(random_bits(KEY, x.shape)).astype(np.int64)
    expected = rounded(x, fmt, rounding, words)
    found = jit_cast(x, fmt, rounding=rounding, key=KEY)
    assert found.dtype == fmt.dtype
    assert_codes(found, expected, x, fmt)
    if fmt.signed or dtype != jnp.float16:
        wide = jit_round(x, fmt, rounding=rounding, key=KEY)
        values = np.where(np.isnan(as_f32(x)), np.nan, values_of(expected.view(fmt.dtype), fmt))
        assert wide.dtype == dtype
        np.testing.assert_array_equal(as_f32(wide), values.astype(np.float32))


@pytest.mark.representative(1)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@dtypes
def test_conversions_of_hardware_give_the_same_codes(fmt, dtype):
    """Casts traced for a GPU, whose instructions XLA:CPU imitates."""
    x = sample(dtype)
    expected = encode(jnp.asarray(x), fmt)
    with traced_for():
        assert hardware_converts(fmt)
        np.testing.assert_array_equal(encode(jnp.asarray(x), fmt), expected)
    assert not hardware_converts(fmt)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_trap_round_trips_are_not_elided(fmt, dtype):
    """A compiler may drop a narrowing conversion and its inverse as excess precision."""
    x = np.linspace(-3, 3, 1001).astype(dtype)
    expected = rounded(x, fmt, "nearest_even").view(fmt.dtype).astype(dtype)
    assert np.any(expected != x)
    there_and_back = jax.jit(lambda x: (cast(x, fmt).astype(dtype), round_to_format(x, fmt)))
    for result in there_and_back(x):
        assert_same(result, expected)


@pytest.mark.representative(6)
@formats
@roundings
def test_gradients_are_the_identity(fmt, rounding):
    """Also where the value saturates or is not finite; of a cast, what its dtype holds of it."""
    x = np.array([0.3, -1e-9, 7.7, 1e9, -np.inf, np.nan, 0.0, 3e-5], np.float32)
    w = np.array([0.1, np.pi, -1e-30, 1e30, 7.0, -0.0, 5.0, 1 / 3], np.float32)
    how = {"rounding": rounding, "key": KEY}
    rounded, narrow = (lambda x, f=f: f(x, fmt, **how) for f in (round_to_format, cast))

    @jax.jit
    def gradients(x, w):
        one_by_one = jax.vmap(jax.grad(lambda x, w: w * rounded(x)))(x, w)
        of_cast = jax.grad(lambda x: jnp.vdot(w, narrow(x).astype(jnp.float32)))(x)
        return one_by_one, of_cast, *(jax.jvp(f, (x,), (w,)) for f in (rounded, narrow))

    one_by_one, of_cast, (primal, tangent), (_, of_narrow) = gradients(x, w)
    assert_same(one_by_one, w)
    assert_same(tangent, w)
    assert_same(primal, jax.jit(rounded)(x))
    assert np.any(np.asarray(primal) != x)
    if fmt in (E4M3FN, E5M2, E2M1FN):
        in_format = as_f32(w).astype(fmt.dtype)
        assert_same(of_narrow, in_format)
        assert_same(of_cast, in_format.astype(np.float32))


CHUNK = 1 << 22


@pytest.mark.slow
@formats
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_all_of_f32(fmt, rounding):
    """All 2^32 patterns, without an oracle for each.

    Codes that never fall from one pattern to the next, and are right on both sides of every place
    where they rise, are right everywhere. Negative patterns are held to the positive ones.
    """
    sign = 0 if not fmt.signed else 1 << fmt.bits - 1

    @jax.jit
    def chunk(start):
        pattern = start + lax.iota(jnp.uint32, CHUNK)
        both = [
            lax.bitcast_convert_type(p, jnp.float32)
            for p in (pattern, pattern | np.uint32(1 << 31))
        ]
        y, negative = (encode(x, fmt, rounding) for x in both)
        odd = negative == y ^ sign if fmt.signed else (negative == 255) | (pattern == 0)
        return y[0], y[-1], jnp.all(y[1:] >= y[:-1]) & jnp.all(odd)

    ends = [tuple(map(int, chunk(np.uint32(s)))) for s in range(0, 1 << 31, CHUNK)]
    assert all(rising for *_, rising in ends)
    flat = [code for first, last, _ in ends for code in (first, last)]
    assert flat == sorted(flat)
    rises = np.array([_first_pattern(code, fmt, rounding) for code in range(1, fmt.max_code + 1)])
    pattern = np.concatenate([rises - 1, rises, [0, 0x7F800000, 0x7F800001]]).astype(np.uint32)
    x = pattern.view(np.float32)
    assert_codes(jit_cast(x, fmt, rounding=rounding), rounded(x, fmt, rounding), x, fmt)
    assert len(set(codes(jit_cast(x, fmt, rounding=rounding)))) == fmt.max_code + 2  # and NaN's


def _first_pattern(code, fmt, rounding) -> int:
    """The smallest positive pattern that the oracle gives `code`, or more."""
    low, high = 0, 0x7F800000
    while low < high:
        middle = (low + high) // 2
        if rounded(np.uint32([middle]).view(np.float32), fmt, rounding)[0] >= code:
            high = middle
        else:
            low = middle + 1
    return low
