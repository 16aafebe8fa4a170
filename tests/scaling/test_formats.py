"""Formats, held to ml_dtypes and to tables of every value, and what casts refuse."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, cast, quantize, round_to_format
from jfp8.scaling import formats
from jfp8.scaling.codes import decode
from support.arrays import assert_same, codes, values_of

FORMATS = (E4M3FN, E5M2, E3M4, E2M1FN, E8M0FNU)
FLT_MAX = float(np.finfo(np.float32).max)


all_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def every_code(fmt) -> np.ndarray:
    return np.arange(2**fmt.bits).astype(np.uint8).view(fmt.dtype)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f is not E3M4], ids=lambda f: f.name)
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
    codes_of_both = np.arange(0x70).astype(np.uint8)
    same = codes_of_both.view(ml_dtypes.float8_e3m4).astype(np.float64)
    np.testing.assert_array_equal(values_of(codes_of_both, E3M4), same)
    assert codes(cast(np.float32([15.5, 16, 30, 31]), E3M4)).tolist() == [0x6F, 0x70, 0x7E, 0x7E]
    with pytest.raises(TypeError, match=r"float8_e3m4 stores none .*uint8 \(E3M4\)"):
        formats.format_of(np.dtype(ml_dtypes.float8_e3m4))


@all_formats
def test_special_codes_are_what_they_are_called(fmt):
    values = values_of(every_code(fmt), fmt)
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
    assert_same(decoded, values_of(every_code(fmt), fmt).astype(np.float32))


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
