"""Formats and casts, held to ml_dtypes and to tables of every value, in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, cast, quantize, round_to_format
from jfp8.scaling import formats
from jfp8.scaling.codes import decode, encode, hardware_converts
from support.arrays import assert_same, codes
from support.devices import traced_for

FORMATS = (E4M3FN, E5M2, E3M4, E2M1FN, E8M0FNU)
OF_ML_DTYPES = (E4M3FN, E5M2, E2M1FN, E8M0FNU)
ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FLT_MAX = float(np.finfo(np.float32).max)
KEY = jax.random.key(0)


def all_formats(function):
    return pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)(function)


def formats_of_ml_dtypes(*, signed=False):
    chosen = [f for f in OF_ML_DTYPES if f.signed or not signed]
    return pytest.mark.parametrize("fmt", chosen, ids=lambda f: f.name)


def roundings(function):
    return pytest.mark.parametrize("rounding", ROUNDINGS)(function)


def dtypes(function):
    return pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)(function)


def from_bits(bits, dtype=np.float32) -> np.ndarray:
    dtype = np.dtype(dtype)
    return (
        np.asarray(bits)
        .astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize])
        .view(dtype)
    )


def every_code(fmt) -> np.ndarray:
    return from_bits(np.arange(2**fmt.bits), fmt.dtype)


def e3m4_value(code: int) -> float:
    """``(-1)^s 2^(e-3) (1 + m/16)``, subnormals at e = 0, and NaN for S.111.1111: as in E4M3FN."""
    sign, e, m = -1.0 if code >> 7 else 1.0, (code >> 4) & 7, code & 15
    if (e, m) == (7, 15):
        return float("nan")
    return sign * ((16 + m) * 2.0 ** (e - 3 - 4) if e else m * 2.0 ** (1 - 3 - 4))


def widened(array, fmt, dtype=np.float32) -> np.ndarray:
    """The values of an array stored in `fmt`, by ml_dtypes or by definition."""
    array = np.asarray(array)
    assert array.dtype == fmt.dtype
    if fmt is E3M4:
        return np.array([e3m4_value(code) for code in range(256)], dtype)[array]
    return as_type(array, dtype)


@cache
def magnitudes(fmt) -> np.ndarray:
    """Every finite value with a clear sign bit, in the order of the codes (which is ascending)."""
    values = widened(every_code(fmt)[: fmt.max_code + 1], fmt, np.float64)
    assert np.all(np.diff(values) > 0)
    return values


SPECIAL_BITS = [
    0x00000000,  # zero; the negative of each is in the sample too
    0x00000001,  # subnormals: the smallest, around 2^-127, the largest
    *(0x00200000, 0x003FFFFF, 0x00400000, 0x00400001, 0x005FFFFF, 0x00600000, 0x007FFFFF),
    *(0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F800000),  # smallest normals, FLT_MAX, Inf
    *(0x7F800001, 0x7FA5A5A5, 0x7FC00000, 0x7FFFFFFF),  # NaNs, signalling and quiet
]


@cache
def f32_sample(fmt) -> np.ndarray:
    """All values of `fmt`, all midpoints, what lies next to either, specials, and random bits."""
    values = magnitudes(fmt)
    above = 2 * values[-1] - values[-2]  # where the next value would be, if there were one
    midpoints = (values + np.append(values[1:], above)) / 2
    edges = np.concatenate([values, midpoints[midpoints <= FLT_MAX]]).astype(np.float32)
    near = (edges.view(np.uint32)[:, None] + np.array([-1, 0, 1])).ravel()
    special = np.concatenate([near, SPECIAL_BITS]) & 0x7FFFFFFF
    rng = np.random.default_rng(0)
    low, high = (int(v) >> 23 for v in np.float32(values[[1, -1]]).view(np.uint32))
    exponents = rng.integers(max(low - 2, 0), min(high + 2, 256), 2**17)
    in_range = (exponents << 23) | rng.integers(0, 2**23, 2**17)
    signs = rng.integers(0, 2, 2**17) << 31
    anything = rng.integers(0, 2**32, 2**20)
    return from_bits(np.concatenate([special, special | 0x80000000, in_range | signs, anything]))


def sample(fmt, dtype) -> np.ndarray:
    """`f32_sample`, or all 65536 patterns of a 16-bit dtype."""
    if dtype == jnp.float32:
        return f32_sample(fmt)
    return from_bits(np.arange(2**16), dtype)


# Oracles and comparisons. A code is compared as an integer, so the sign of a zero counts.


def as_type(x, dtype) -> np.ndarray:
    """numpy's conversion, without its warnings about signalling NaNs and overflow."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def neighbours(x, fmt) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the magnitudes next to |x|: the largest not above it, the smallest not below it."""
    table, a = magnitudes(fmt), np.abs(as_type(x, np.float64))
    below = np.searchsorted(table, a, side="right") - 1
    above = np.searchsorted(table, a, side="left")
    return np.clip(below, 0, fmt.max_code), np.clip(above, 0, fmt.max_code)


def with_sign_and_nan(magnitude_codes, x, fmt) -> np.ndarray:
    """The codes of `x`, given those of its magnitude."""
    x = as_type(x, np.float32)
    if not fmt.signed:
        return np.where(np.isnan(x) | (x < 0), 255, magnitude_codes).astype(np.uint8)
    signs = np.signbit(x).astype(np.uint8) << (fmt.bits - 1)
    return (np.where(np.isnan(x), fmt.nan_code, magnitude_codes) ^ signs).astype(np.uint8)


def nearest_codes(x, fmt) -> np.ndarray:
    """ml_dtypes' conversion after a saturating clip; a table of the values for E8M0 and E3M4."""
    if fmt.signed and fmt in OF_ML_DTYPES:
        clipped = np.clip(as_type(x, np.float32), -fmt.max, fmt.max)
        return codes(as_type(clipped, fmt.dtype))
    below, above = neighbours(x, fmt)
    table, a = magnitudes(fmt), np.abs(as_type(x, np.float64))
    with np.errstate(invalid="ignore"):
        to_below, to_above = a - table[below], table[above] - a
        tie_goes_up = below % 2 == 1 if fmt.signed else True
        up = (to_below > to_above) | ((to_below == to_above) & tie_goes_up)
    return with_sign_and_nan(np.where(up, above, below), x, fmt)


def toward_zero_codes(x, fmt) -> np.ndarray:
    return with_sign_and_nan(neighbours(x, fmt)[0], x, fmt)


def is_nan(array) -> np.ndarray:
    return np.isnan(as_type(array, np.float32))


@formats_of_ml_dtypes()
def test_format_data_is_that_of_ml_dtypes(fmt):
    info = ml_dtypes.finfo(fmt.dtype)
    assert fmt.bits == info.bits
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.exponent_bits == info.nexp
    assert fmt.min_exponent == info.minexp
    assert fmt.max_exponent == info.maxexp - 1
    assert fmt.signed == (info.min < 0)


def test_trap_e3m4_is_not_the_e3m4_of_ml_dtypes():
    """IEEE's has a maximum of 15.5 and an Inf, and its name is the same."""
    ieee = ml_dtypes.finfo(ml_dtypes.float8_e3m4)
    assert float(ieee.max) == 15.5
    codes_of_both = np.arange(0x70)
    same = from_bits(codes_of_both, ml_dtypes.float8_e3m4).astype(np.float64)
    np.testing.assert_array_equal([e3m4_value(code) for code in codes_of_both], same)
    assert codes(cast(np.float32([15.5, 16, 30, 31]), E3M4)).tolist() == [0x6F, 0x70, 0x7E, 0x7E]
    with pytest.raises(TypeError, match=r"float8_e3m4 stores none .*uint8 \(E3M4\)"):
        formats.format_of(np.dtype(ml_dtypes.float8_e3m4))


@all_formats
def test_special_codes_are_what_they_are_called(fmt):
    values = widened(every_code(fmt), fmt, np.float64)
    assert values[fmt.max_code] == fmt.max == np.max(values[np.isfinite(values)])
    assert np.isnan(values[fmt.nan_code]) == fmt.has_nan == np.isnan(values).any()
    one = (fmt.bias << fmt.mantissa_bits) if fmt.signed else fmt.bias
    assert values[one] == 1.0
    assert np.min(values[values > 0]) == fmt.smallest_subnormal


@all_formats
@pytest.mark.parametrize("jit", [False, True])
def test_decode_gives_the_value_of_every_code(fmt, jit):
    decoder = jax.jit(decode) if jit else decode
    decoded = decoder(jnp.asarray(every_code(fmt)))
    assert_same(decoded, widened(every_code(fmt), fmt))


@all_formats
@dtypes
def test_cast_rounds_to_nearest(fmt, dtype):
    """Or toward zero."""
    x = sample(fmt, dtype)
    assert_same(cast(x, fmt), nearest_codes(x, fmt).view(fmt.dtype))
    toward_zero = cast(x, fmt, rounding="toward_zero")
    assert_same(toward_zero, toward_zero_codes(x, fmt).view(fmt.dtype))


@pytest.mark.representative(1)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@dtypes
def test_conversions_of_hardware_give_the_same_codes(fmt, dtype):
    """What is traced for a GPU, whose instructions XLA:CPU imitates."""
    x = sample(fmt, dtype)
    expected = encode(jnp.asarray(x), fmt)
    with traced_for():
        assert hardware_converts(fmt)
        np.testing.assert_array_equal(encode(jnp.asarray(x), fmt), expected)
    assert not hardware_converts(fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(f, d) for f in FORMATS for d in DTYPES if f.signed or d != jnp.float16],
    ids=lambda v: v.name if v in FORMATS else np.dtype(v).name,
)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_round_to_format_gives_the_values_of_cast(fmt, dtype, rounding):
    """NaN stays NaN, even for E2M1, and the values stay in the dtype of the input."""
    x = sample(fmt, dtype)
    oracle = nearest_codes if rounding == "nearest_even" else toward_zero_codes
    expected = widened(oracle(x, fmt).view(fmt.dtype), fmt)
    expected = as_type(np.where(is_nan(x), np.float32(np.nan), expected), dtype)
    assert_same(round_to_format(x, fmt, rounding=rounding), expected)


def test_e8m0_codes_that_are_special():
    """No sign, no zero, no Inf: see the docstring of `cast`."""
    exact = {2.0**-127: 0, 2.0**-126: 1, 1.0: 127, 2.0**127: 254}
    low = {0.0: 0, 1e-45: 0, 2.0**-128: 0, 2.0**-127 * (1 + 2**-20): 0}
    high = {FLT_MAX: 254, np.inf: 254}
    ties_go_up = {1.5: 128, 3.0: 129, 1.5 * 2.0**-127: 1, 1.5 * 2.0**-126: 2, 0.75: 127}
    invalid = {-1.0: 255, -1e-45: 255, -np.inf: 255, -FLT_MAX: 255, np.nan: 255}
    table = exact | low | high | ties_go_up | invalid
    result = codes(cast(np.array(list(table), np.float32), E8M0FNU))
    assert dict(zip(table, result.tolist(), strict=True)) == table


@pytest.mark.slow
@formats_of_ml_dtypes(signed=True)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_trap_round_trips_are_not_elided(fmt, dtype):
    """A compiler may drop a narrowing conversion and its inverse as excess precision."""
    x = np.linspace(-3, 3, 1001).astype(dtype)
    expected = nearest_codes(x, fmt).view(fmt.dtype).astype(dtype)
    assert np.any(expected != x)
    there_and_back = jax.jit(lambda x: (cast(x, fmt).astype(dtype), round_to_format(x, fmt)))
    for result in there_and_back(x):
        assert_same(result, expected)


@pytest.mark.representative(6)
@all_formats
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
    if fmt in OF_ML_DTYPES and fmt.signed:
        in_format = as_type(w, fmt.dtype)
        assert_same(of_narrow, in_format)
        assert_same(of_cast, in_format.astype(np.float32))


@pytest.mark.parametrize("function", [cast, round_to_format])
def test_errors_name_the_dtype(function):
    for x, dtype in ((1j, "complex64"), (3, "int32"), (np.arange(3, dtype=np.uint8), "uint8")):
        words = rf"dtype {dtype}.* floating .*x\.astype\(jnp\.float32\)"
        with pytest.raises(TypeError, match=words):
            function(x, E4M3FN)
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match=r"float64.* rounded twice .*x\.astype\(jnp\.float32\)"):
            function(jnp.ones(3, jnp.float64), E4M3FN)
        assert function(jnp.ones(3, jnp.float32), E4M3FN).tolist() == [1, 1, 1]


@pytest.mark.parametrize("function", [cast, round_to_format])
def test_errors_say_what_to_pass(function):
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"'nearest' is unknown.*nearest_even, toward_zero, stoch"):
        function(x, E4M3FN, rounding="nearest")
    with pytest.raises(ValueError, match=r"stochastic.*key is None.*key=jax\.random\.key"):
        function(x, E4M3FN, rounding="stochastic")
    for wrong in (3, jnp.uint8, np.dtype(ml_dtypes.float8_e4m3)):
        with pytest.raises(TypeError, match=r"jfp8\.Format, one of jfp8\.E4M3FN, .*got"):
            function(x, wrong)


def test_a_format_by_name_and_by_dtype():
    x, dtype = np.float32([0.3, 500.0]), ml_dtypes.float8_e4m3fn
    for given in ("e4m3", "e4m3fn", "E4M3FN", "float8_e4m3fn", dtype, np.dtype(dtype), E4M3FN):
        assert formats.as_format(given) is E4M3FN
        assert cast(x, given).dtype == dtype
        assert round_to_format(x, given).tolist() == [0.3125, 448.0]
        assert quantize(x, given).format is E4M3FN
    # Formats of ml_dtypes, with an Inf among them: E4M3 up to 240, E3M4 up to 15.5.
    for other in ("float8_e4m3", "float8_e3m4", "e4m3fnuz", "uint8", ""):
        with pytest.raises(ValueError, match=r"there is no such format.*jfp8\.E4M3FN"):
            formats.as_format(other)


def test_round_to_e8m0_refuses_float16():
    with pytest.raises(TypeError, match=r"E8M0FNU reaches from .* float16 cannot hold.*astype"):
        round_to_format(np.ones(3, np.float16), E8M0FNU)
