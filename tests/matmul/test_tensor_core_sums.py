"""Sums as tensor cores make them, bit for bit: held to results of mmaemu.

`data/hopper_golden.npz` was made once, by `write_golden` below (seed 0), with mmaemu 0.1.0 from
PyPI, torch 2.15.0 on a CPU, numpy 2.4.6 and Python 3.11. For the formats e4m3fn and e5m2 it holds

* ``{format}_lhs``, ``{format}_rhs``: uint8[17, 1024], codes, one kind of data per row (`KINDS`);
* ``{lhs format}_{rhs format}_fast``: uint32[8, 17, 17], f32 bits, for each K of `GOLDEN_K`, of
  ``mmaemu.accumulate(lhs[:, :K], rhs[:, :K], use_fast_accum=True, profile="hopper", splitk=1)``;
* ``{lhs format}_{rhs format}_every_128``: the same with ``use_fast_accum=False``;
* ``scaled_float32_{fast | every_128}``, ``scaled_bfloat16_{fast | every_128}``: uint32 or
  uint16[16, 16], bits of ``mmaemu.scaled_mm`` of the first 16 rows in e4m3fn, with the two scales
  in ``scales``: f32[2].
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8.matmul.tensor_core_sums import dot_general

DTYPES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MANTISSA_BITS = {"e4m3fn": 3, "e5m2": 2}
PAIRS = [(lhs, rhs) for lhs in DTYPES for rhs in DTYPES]
NAN = 0x7FFFFFFF  # the only NaN that tensor cores return
GOLDEN = Path(__file__).parents[1] / "data" / "hopper_golden.npz"
GOLDEN_K = (1, 31, 32, 33, 64, 128, 160, 1024)
ROWS = (((1,), (1,)), ((), ()))  # both operands are rows: lhs @ rhs.T

pairs = pytest.mark.parametrize("formats", PAIRS, ids="x".join)


def f8(values, fmt="e4m3fn"):
    return jnp.asarray(np.asarray(values, np.float32).astype(DTYPES[fmt]))


def from_codes(codes, fmt):
    return jnp.asarray(np.asarray(codes, np.uint8).view(DTYPES[fmt]))


def random_codes(rng, shape, fmt, first=0, last=None):
    """Finite codes of either sign with magnitudes from code `first` to `last`."""
    last = {"e4m3fn": 0x7E, "e5m2": 0x7B}[fmt] if last is None else last
    return (rng.integers(first, last + 1, shape) | (rng.integers(0, 2, shape) << 7)).astype(
        np.uint8
    )


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


# What mmaemu returns.

KINDS = (
    "normal", "normal", "positive normal", "positive wide", "wide", "wide", "tiny", "outliers",
    "sparse", "zeros", "cancels in pairs", "cancels across blocks", "one large first", "integers",
    "a NaN", "an infinity", "infinities of both signs",
)  # fmt: skip


def golden_codes(rng, fmt, side):
    """uint8[17, 1024]. E4M3 has no infinities, and NaN takes their place."""
    nan, inf = 0x7F, {"e4m3fn": 0x7F, "e5m2": 0x7C}[fmt]
    normal = (rng.normal(size=(17, 1024)) * 40).astype(DTYPES[fmt]).view(np.uint8)
    wide = random_codes(rng, (17, 1024), fmt)
    tiny = random_codes(rng, (17, 1024), fmt, last=2 << MANTISSA_BITS[fmt])
    x = {kind: normal[row].copy() for row, kind in enumerate(KINDS)}
    x["positive normal"] &= 0x7F
    x["positive wide"] = wide[3] & 0x7F
    x["tiny"] = tiny[6]
    x["outliers"] = np.where(np.arange(1024) % 97 == 40, wide[7], tiny[7])
    x["sparse"] = np.where(rng.random(1024) < 0.05, wide[8], wide[8] & 0x80)
    x["zeros"] = wide[9] & 0x80
    x["cancels in pairs"] = wide[10].reshape(-1, 2)[:, :1].repeat(2, 1).ravel()
    x["cancels across blocks"] = wide[11].reshape(-1, 2, 32)[:, :1].repeat(2, 1).ravel()
    if side == "rhs":
        x["cancels in pairs"][1::2] ^= 0x80
        x["cancels across blocks"].reshape(-1, 2, 32)[:, 1] ^= 0x80
    x["one large first"] = np.array([240] + 1023 * [1.875], DTYPES[fmt]).view(np.uint8)
    x["integers"] = rng.integers(-4, 5, 1024).astype(DTYPES[fmt]).view(np.uint8)
    x["a NaN"][40] = nan
    x["an infinity"][20] = inf
    x["infinities of both signs"][[5, 50]] = inf, inf | 0x80
    rows = [normal[0], normal[1], x["positive normal"], x["positive wide"], wide[4], wide[5]]
    return np.stack(rows + [x[kind] for kind in KINDS[6:]])


def write_golden():
    """Runs where torch and mmaemu are installed; no test calls it."""
    import mmaemu
    import torch

    rng = np.random.default_rng(0)
    out = {f"{f}_{side}": golden_codes(rng, f, side) for f in DTYPES for side in ("lhs", "rhs")}
    dtypes = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    hopper = {"profile": "hopper", "splitk": 1}
    for name, fast in (("fast", True), ("every_128", False)):
        for lhs_format, rhs_format in PAIRS:
            a = torch.from_numpy(out[f"{lhs_format}_lhs"]).view(dtypes[lhs_format])
            b = torch.from_numpy(out[f"{rhs_format}_rhs"]).view(dtypes[rhs_format])
            results = [
                mmaemu.accumulate(a[:, :k], b[:, :k], use_fast_accum=fast, **hopper)
                for k in GOLDEN_K
            ]
            out[f"{lhs_format}_{rhs_format}_{name}"] = bits(torch.stack(results))
        scales = np.float32([0.0137, 31.7])
        a, b = (torch.from_numpy(out[f"e4m3fn_{side}"][:16]) for side in ("lhs", "rhs"))
        for dtype, lanes in ((torch.float32, np.uint32), (torch.bfloat16, np.uint16)):
            y = mmaemu.scaled_mm(
                a.view(torch.float8_e4m3fn),
                b.view(torch.float8_e4m3fn).t(),
                *(torch.tensor(s) for s in scales),
                out_dtype=dtype,
                use_fast_accum=fast,
                **hopper,
            )
            key = f"scaled_{str(dtype).removeprefix('torch.')}_{name}"
            out[key] = (
                y.view(torch.int16 if lanes == np.uint16 else torch.int32).numpy().view(lanes)
            )
        out["scales"] = scales
    np.savez_compressed(GOLDEN, **out)


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


def test_golden_results_are_worth_comparing_with(golden):
    """They hold every class of value, and differ from exact sums and between the two ways."""
    fast = golden["e5m2_e5m2_fast"].view(np.float32)
    for found in (np.isnan(fast), fast == np.inf, fast == -np.inf, fast == 0, abs(fast) < 2**-20):
        assert found.sum() > 10
    values = [golden[f"e5m2_{side}"].view(DTYPES["e5m2"]).astype(float) for side in ("lhs", "rhs")]
    with np.errstate(invalid="ignore"):
        exact = values[0] @ values[1].T
    assert (fast[-1] != exact).mean() > 0.5
    for formats in PAIRS:
        every_128, fast = (golden["_".join(formats) + "_" + n] for n in ("every_128", "fast"))
        short = np.array(GOLDEN_K) <= 128
        assert (every_128[short] == fast[short]).all()
        assert (every_128[-1] != fast[-1]).mean() > 0.4


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


@pytest.mark.slow
@pairs
def test_every_product_of_two_codes(formats):
    """256 x 256 codes alone: exact, and IEEE's for NaN and infinities."""
    codes = [np.arange(256, dtype=np.uint8).view(DTYPES[fmt]) for fmt in formats]
    got = dot_general(*(jnp.asarray(c) for c in codes), (((), ()), ((), ())))
    with np.errstate(invalid="ignore"):
        expected = np.multiply.outer(*(c.astype(np.float32) for c in codes)) + np.float32(0)
    expected = np.where(np.isnan(expected), np.uint32(NAN).view(np.float32), expected)
    assert_same_bits(got, expected)


# What the model does, one statement each.


def dot(a, b, fmt="e5m2"):
    """Sum of products of two lists of values, which `fmt` must hold."""
    operands = f8(a, fmt), f8(b, fmt)
    np.testing.assert_array_equal([np.asarray(x, np.float32) for x in operands], [a, b])
    return dot_general(*operands, (((0,), (0,)), ((), ()))).item()


def test_exact_where_14_bits_suffice():
    x, w = np.random.default_rng(0).integers(-8, 9, (2, 5, 71))
    assert abs(x @ w.T).max() > 256
    np.testing.assert_array_equal(dot_general(f8(x), f8(w, "e5m2"), ROWS), x @ w.T)


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


# Sums of many.


def relative_errors(x, w, step=None):
    """Error in units of sum |x w|, of one chain or of the f32 sum of chains of `step` products."""
    k = x.shape[1]
    got = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, k, step or k):
        part = slice(start, start + (step or k))
        got += np.asarray(dot_general(x[:, part], w[:, part], ROWS))
    x, w = (np.asarray(v).astype(np.float64) for v in (x, w))
    return (got - x @ w.T) / (abs(x) @ abs(w).T)


def test_trap_positive_data_are_biased_low():
    """A sum that only grows cuts more and more from what is added to it, unless promoted."""
    x, w = (f8(abs(v)) for v in np.random.default_rng(0).normal(size=(2, 64, 1024)) * 40)
    fast, slow = (relative_errors(x, w, step) for step in (None, 128))
    assert fast.max() < -0.010
    assert -0.016 < fast.mean() < -0.012
    assert slow.max() < 0
    assert -7e-4 < slow.mean() < -5e-4


# Shapes and transformations.


@pytest.mark.slow
@pytest.mark.parametrize(("m", "k", "n"), [(0, 5, 3), (4, 5, 0), (4, 0, 3), (1, 1, 1)])
def test_empty_and_single(m, k, n):
    y = dot_general(f8(np.ones((m, k))), f8(np.full((k, n), 2)), (((1,), (0,)), ((), ())))
    assert y.dtype == jnp.float32
    assert_same_bits(y, np.full((m, n), 2 * k, np.float32))


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
