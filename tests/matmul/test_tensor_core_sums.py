"""Sums as tensor cores make them, bit for bit: held to results of mmaemu.

`data/hopper_golden.npz` was made once, with mmaemu 0.1.0 from PyPI, torch 2.15.0 on a CPU,
numpy 2.4.6 and Python 3.11. For the formats e4m3fn and e5m2 it holds

* ``{format}_lhs``, ``{format}_rhs``: uint8[17, 1024], codes: rows of normal, wide, tiny and sparse
  data, of integers, zeros and outliers, of what cancels or is not finite;
* ``{lhs format}_{rhs format}_fast``: uint32[8, 17, 17], f32 bits, for each K of `GOLDEN_K`, of
  ``mmaemu.accumulate(lhs[:, :K], rhs[:, :K], use_fast_accum=True, profile="hopper", splitk=1)``;
* ``{lhs format}_{rhs format}_every_128``: the same with ``use_fast_accum=False``;
* ``scaled_float32_{fast | every_128}``, ``scaled_bfloat16_{fast | every_128}``: uint32 or
  uint16[16, 16], bits of ``mmaemu.scaled_mm`` of the first 16 rows in e4m3fn, with the two scales
  in ``scales``: f32[2].
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8.matmul.tensor_core_sums import dot_general

DTYPES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
PAIRS = [(lhs, rhs) for lhs in DTYPES for rhs in DTYPES]
NAN = 0x7FFFFFFF  # the only NaN that tensor cores return
GOLDEN = Path(__file__).parents[1] / "data" / "hopper_golden.npz"
GOLDEN_K = (1, 31, 32, 33, 64, 128, 160, 1024)
ROWS = (((1,), (1,)), ((), ()))  # both operands are rows: lhs @ rhs.T


def f8(values, fmt="e4m3fn"):
    return jnp.asarray(np.asarray(values, np.float32).astype(DTYPES[fmt]))


def from_codes(codes, fmt):
    return jnp.asarray(np.asarray(codes, np.uint8).view(DTYPES[fmt]))


def bits(x):
    return np.asarray(x).view(np.uint32)


def assert_same_bits(got, expected):
    got, expected = bits(got), bits(expected)
    assert got.shape == expected.shape
    where = np.argwhere(got != expected)
    assert not where.size, (
        f"{len(where)} of {got.size} differ, first at {where[0]}: {got[tuple(where[0])]:#010x} "
        f"instead of {expected[tuple(where[0])]:#010x}"
    )


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return dict(stored)


# Compiling takes longer than comparing, and each pair is compiled anew for each number of blocks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "k"),
    [(pair, k) for pair in PAIRS for k in GOLDEN_K if pair == PAIRS[0] or k in (33, 1024)],
    ids=lambda value: str(value) if isinstance(value, int) else "x".join(value),
)
def test_equals_mmaemu(golden, formats, k):
    lhs, rhs = (
        from_codes(golden[f"{fmt}_{side}"][:, :k], fmt)
        for fmt, side in zip(formats, ("lhs", "rhs"), strict=True)
    )
    expected = golden["_".join(formats) + "_fast"][GOLDEN_K.index(k)]
    assert_same_bits(dot_general(lhs, rhs, ROWS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [PAIRS[0], PAIRS[-1]], ids="x".join)
def test_promoted_every_128_equals_mmaemu(golden, formats):
    """One chain for each 128 of the contraction, and f32 sums of them in order."""
    lhs, rhs = (
        from_codes(golden[f"{fmt}_{side}"], fmt)
        for fmt, side in zip(formats, ("lhs", "rhs"), strict=True)
    )
    total = np.zeros((17, 17), np.float32)
    with np.errstate(invalid="ignore"):
        for start in range(0, 1024, 128):
            k = slice(start, start + 128)
            total = total + np.asarray(dot_general(lhs[:, k], rhs[:, k], ROWS))
    total = np.where(np.isnan(total), np.uint32(NAN).view(np.float32), total)
    assert_same_bits(total, golden["_".join(formats) + "_every_128"][-1])


# The behavior of the model, one statement per test.


def dot(a, b, fmt="e5m2"):
    """Sum of products of two lists of values, which `fmt` must hold."""
    operands = f8(a, fmt), f8(b, fmt)
    np.testing.assert_array_equal([np.asarray(x, np.float32) for x in operands], [a, b])
    return dot_general(*operands, (((0,), (0,)), ((), ()))).item()


def test_terms_are_cut_toward_zero():
    ulp = 2.0**-13
    for sign in (1, -1):
        assert dot([sign, sign * ulp], [1, 1]) == sign * (1 + ulp)
        assert dot([sign, sign * 1.75 * ulp], [1, 1]) == sign * (1 + ulp)
        assert dot([sign] + 31 * [sign * 0.875 * ulp], 32 * [1]) == sign


def test_trap_products_are_not_normalized():
    """1.75 * 1.75 = 3.0625 has a leading 2, but cuts the others at 2^-13; only the sum at 2^-12."""
    ulp = 2.0**-13
    assert dot([1.75, ulp], [1.75, 1]) == 3.0625
    assert dot([1.75, ulp, ulp], [1.75, 1, 1]) == 3.0625 + 2 * ulp


def test_trap_zero_products_have_no_exponent():
    tiny = 2.0**-16
    assert dot([57344, tiny, -0.0], [0, tiny, 57344]) == tiny**2


def test_trap_zero_results_are_positive():
    for a in ([0.0, -0.0], [-0.0, -0.0], [1, -1], [-(2.0**-16), 2.0**-16]):
        assert bits(np.float32(dot(a, [1, 1]))) == 0


@pytest.mark.slow
def test_nan_and_infinities_as_in_ieee_arithmetic():
    """Wherever they stand, and though zeros fill up the last block."""
    x = np.ones((9, 70))
    x[1, 69] = x[2, 0] = np.inf
    x[3, 5] = x[4, [5, 60]] = -np.inf
    x[5, 3], x[5, 60] = np.inf, -np.inf
    x[6, 1] = np.nan
    x[7, 2], x[8, 40] = np.inf, 0
    w = np.ones((2, 70))
    w[1, 2] = 0
    inf, nan = np.inf, np.uint32(NAN).view(np.float32)
    expected = [
        [70, inf, inf, -inf, -inf, nan, nan, inf, 69],
        [69, inf, inf, -inf, -inf, nan, nan, nan, 68],
    ]
    assert_same_bits(dot_general(f8(w, "e5m2"), f8(x, "e5m2"), ROWS), np.float32(expected))


@pytest.mark.slow
def test_no_outer_product_is_stored():
    """Each of the 64 would take 256 KiB; the decoded operands take 160 KiB, the sums 256 KiB."""
    x = jax.ShapeDtypeStruct((256, 64), jnp.float8_e4m3fn)
    compiled = jax.jit(lambda x, w: dot_general(x, w, ROWS)).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_other_formats_are_refused():
    x, f4 = f8(np.ones((2, 2))), jnp.ones((2, 2), jfp8.E2M1FN.dtype)
    with pytest.raises(NotImplementedError, match="E4M3FN and E5M2, but .* E2M1FN and E4M3FN"):
        dot_general(f4, x, ROWS)
    with pytest.raises(TypeError, match="float32 stores none of jfp8's formats"):
        dot_general(x, jnp.ones((2, 2)), ROWS)
