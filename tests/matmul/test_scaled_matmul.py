"""`scaled_matmul` and its backends: one suite for all, held to products in float64 and int64."""

from __future__ import annotations

import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import ScaledArray, quantize, scaled_matmul
from jfp8.scaling.codes import codes_to_format

E4M3, E5M2 = jfp8.E4M3FN, jfp8.E5M2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
PLAIN = (((1,), (0,)), ((), ()))
implementations = pytest.mark.parametrize("implementation", ["emulate", "xla", None])
pairs = pytest.mark.parametrize("formats", PAIRS, ids=lambda p: f"{p[0].name}x{p[1].name}")


# Dimension numbers: the corners, by name. Others, and other scales and formats, are drawn in
# tests/properties.


CASES = {
    "outer product": ((3, 2), (5,), (((), ()), ((), ()))),
    "full contraction": ((3, 4, 5), (5, 3, 4), (((1, 2, 0), (2, 0, 1)), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
    "only batch": ((4, 3), (3, 4), (((), ()), ((0, 1), (1, 0)))),
    "no rows": ((0, 5), (5, 3), PLAIN),
    "no columns": ((4, 5), (5, 0), PLAIN),
    "empty contraction": ((4, 0), (0, 3), PLAIN),
    "empty batch": ((0, 4, 2), (2, 3, 0), (((2,), (0,)), ((0,), (2,)))),
    "lists and numpy integers": ((4, 6), (6, 5), [[[np.int64(1)], np.array([0])], [[], []]]),
}
cases = pytest.mark.parametrize("case", CASES)


def equation(lhs_ndim, rhs_ndim, numbers):
    """Dimension numbers as an einsum, which numpy computes in any dtype."""
    (lc, rc), (lb, rb) = (tuple(tuple(int(d) for d in side) for side in pair) for pair in numbers)
    lhs = list(string.ascii_lowercase[:lhs_ndim])
    rhs = list(string.ascii_uppercase[:rhs_ndim])
    for a, b in zip(lc + lb, rc + rb, strict=True):
        rhs[b] = lhs[a]
    out = [lhs[a] for a in lb]
    out += [c for i, c in enumerate(lhs) if i not in lc + lb]
    out += [c for i, c in enumerate(rhs) if i not in rc + rb]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"


def oracle(lhs, rhs, numbers):
    """float64 (or int64) product of two numpy arrays."""
    return np.einsum(equation(lhs.ndim, rhs.ndim, numbers), lhs, rhs)


def matmul(lhs, rhs, numbers=PLAIN, **options):
    return jax.jit(lambda l, r: scaled_matmul(l, r, numbers, **options))(lhs, rhs)


def random_integers(rng, shape, fmt):
    """Integers that both formats hold exactly: their products and sums are exact in f32."""
    return jnp.asarray(rng.integers(-8, 9, shape), jnp.float32).astype(fmt.dtype)


def e8m0(codes):
    return codes_to_format(jnp.asarray(codes, jnp.uint8), jfp8.E8M0FNU)


# Numbers


@pytest.mark.slow
@implementations
@cases
def test_any_dimension_numbers_exactly(case, implementation):
    """On small integers every order of summation is exact, so bitwise equality is owed."""
    lhs_shape, rhs_shape, numbers = CASES[case]
    rng = np.random.default_rng(1)
    fmt_lhs, fmt_rhs = PAIRS[len(case) % 3]
    lhs = ScaledArray(random_integers(rng, lhs_shape, fmt_lhs), jnp.float32(2.0**-3))
    rhs = ScaledArray(random_integers(rng, rhs_shape, fmt_rhs), jnp.float32(2.0**5))
    y = matmul(lhs, rhs, numbers, implementation=implementation)
    expected = oracle(*(np.asarray(q.data).astype(np.int64) for q in (lhs, rhs)), numbers) * 4
    assert y.dtype == jnp.float32
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


@pytest.mark.slow
@implementations
@pairs
def test_every_product_of_two_codes(formats, implementation):
    """256 x 256 codes, NaN and Inf among them: each product is exact in f32."""
    codes = [codes_to_format(jnp.arange(256, dtype=jnp.uint8), fmt) for fmt in formats]
    lhs, rhs = (ScaledArray(c, jnp.float32(1)) for c in codes)
    y = np.asarray(matmul(lhs, rhs, (((), ()), ((), ())), implementation=implementation))
    with np.errstate(invalid="ignore"):
        expected = np.multiply.outer(*(np.asarray(c).astype(np.float64) for c in codes))
    np.testing.assert_array_equal(y, expected)
    assert np.isfinite(y).sum() >= (256 - 8) ** 2


@pytest.mark.slow
@implementations
@pytest.mark.parametrize("fast", [True, False])
def test_fast_accumulation_is_a_licence_for_hardware_only(implementation, fast):
    """65536 + 4095 * 1: an accumulator of 14 bits would lose each of the ones."""
    ones = jnp.full((1, 4096), 1, E4M3.dtype).at[0, 0].set(256)
    lhs = ScaledArray(ones, jnp.float32(1))
    rhs = ScaledArray(ones.T, jnp.float32(1))
    y = matmul(lhs, rhs, implementation=implementation, fast_accumulation=fast)
    assert y.item() == 256 * 256 + 4095


@pytest.mark.slow
@implementations
def test_trap_bf16_rounds_after_the_scales(implementation):
    """257 * 3: rounding the accumulator first would give 256 * 3 = 768; 771 rounds to 772."""
    lhs = ScaledArray(jnp.array([[256.0, 1.0]]).astype(E4M3.dtype), jnp.float32(3))
    rhs = ScaledArray(jnp.ones((2, 1), E4M3.dtype), jnp.float32(1))
    y = matmul(lhs, rhs, implementation=implementation, preferred_element_type=jnp.bfloat16)
    assert y.item() == 772


@pytest.mark.slow
@implementations
def test_trap_zero_times_the_product_of_huge_scales(implementation):
    """Of 2^100 and 2^60 that is Inf in f32, and 0 times Inf is NaN. What is not zero is Inf."""
    codes = jnp.array([[0.0, 0.0], [1.0, 2.0]], E4M3.dtype)
    lhs = ScaledArray(codes, jnp.float32(2.0**100))
    rhs = ScaledArray(jnp.ones((2, 2), E4M3.dtype), jnp.float32(2.0**60))
    y = np.asarray(matmul(lhs, rhs, implementation=implementation))
    np.testing.assert_array_equal(y, [[0, 0], [np.inf, np.inf]])


@pytest.mark.slow
@implementations
def test_trap_f16_accumulator_overflow(implementation):
    """448 * 448 * 256 is 784 times what f16 holds; with the scales it fits."""
    lhs = ScaledArray(jnp.full((2, 256), 448, E4M3.dtype), jnp.float32(2.0**-8))
    rhs = ScaledArray(jnp.full((256, 2), 448, E4M3.dtype), jnp.float32(2.0**-8))
    y = matmul(lhs, rhs, implementation=implementation, preferred_element_type=jnp.float16)
    np.testing.assert_array_equal(y, np.full((2, 2), 784, np.float16))


@pytest.mark.slow
@implementations
@pairs
def test_trap_product_of_f8_arrays_is_f32(formats, implementation):
    """``f8 @ f8`` gives f8 in JAX, and mixed formats a TypePromotionError."""
    lhs = ScaledArray(jnp.full((1, 100), 16, formats[0].dtype), jnp.float32(1))
    rhs = ScaledArray(jnp.full((100, 1), 16, formats[1].dtype), jnp.float32(1))
    y = scaled_matmul(lhs, rhs, PLAIN, implementation=implementation)
    assert y.dtype == jnp.float32
    assert y.item() == 25600  # neither saturated at 448 nor rounded to two bits


# Scales


@pytest.mark.slow
@implementations
@pytest.mark.parametrize(
    ("lhs_code", "rhs_code"),
    [(0, 254), (254, 0), (0, 127), (127, 0), (1, 1 + 127), (254, 127), (0, 200)],
)
def test_trap_e8m0_codes_at_the_ends_survive(lhs_code, rhs_code, implementation):
    """Code 0 is 2^-127, an f32 subnormal: a multiplication that forms it gives zero."""
    data = jnp.array([[448.0, 64.0, 2.0]]).astype(E4M3.dtype)
    lhs = ScaledArray(data, e8m0(lhs_code))
    rhs = ScaledArray(data.T.at[1:].set(0), e8m0(rhs_code))
    y = matmul(lhs, rhs, implementation=implementation).item()
    exact = 448 * 448 * 2.0 ** (lhs_code + rhs_code - 254)
    assert y == (exact if exact < 2.0**128 else np.inf)


@pytest.mark.slow
@implementations
def test_e8m0_nan_scale_is_nan_where_it_applies(implementation):
    lhs = ScaledArray(jnp.ones((3, 4), E4M3.dtype), e8m0([[127], [255], [128]]))
    rhs = ScaledArray(jnp.ones((4, 2), E4M3.dtype), e8m0(127))
    y = matmul(lhs, rhs, implementation=implementation)
    np.testing.assert_array_equal(y, [[4, 4], [np.nan, np.nan], [8, 8]])


@pytest.mark.slow
@implementations
def test_nan_stays_in_its_row(implementation):
    lhs = ScaledArray(jnp.ones((3, 70), E4M3.dtype).at[1, 50].set(jnp.nan), jnp.float32(1))
    rhs = ScaledArray(jnp.ones((70, 2), E4M3.dtype), jnp.float32(1))
    y = matmul(lhs, rhs, implementation=implementation)
    np.testing.assert_array_equal(y, [[70, 70], [np.nan, np.nan], [70, 70]])


# Errors


def operands():
    return quantize(jnp.ones((4, 6))), quantize(jnp.ones((6, 5)))


@pytest.mark.parametrize("which", ["lhs", "rhs"])
def test_error_not_scaled(which):
    pair = dict(zip(("lhs", "rhs"), operands(), strict=True)) | {which: jnp.ones((6, 6))}
    with pytest.raises(TypeError, match=rf"{which} must be a ScaledArray.*jfp8\.quantize"):
        scaled_matmul(**pair, dimension_numbers=PLAIN)


def test_error_unknown_implementation_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"unknown. Allowed: 'emulate', 'bf16', 'xla', .*'mosaic_tpu', or None",
    ):
        scaled_matmul(*operands(), PLAIN, implementation="cuda")


def test_error_unknown_accumulation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"accumulation='f16' is unknown.*'f32'"):
        scaled_matmul(*operands(), PLAIN, accumulation="f16")


@pytest.mark.parametrize("kind", ["contracting", "batch"])
def test_error_sizes_name_both(kind):
    lhs, rhs = quantize(jnp.ones((2, 7))), quantize(jnp.ones((5, 3)))
    numbers = (((1,), (0,)), ((), ())) if kind == "contracting" else (((), ()), ((1,), (0,)))
    words = (
        rf"{kind} dimension 1 of lhs has size 7, but dimension 0 of rhs.*size 5.*\(2, 7\).*\(5, 3\)"
    )
    with pytest.raises(ValueError, match=words):
        scaled_matmul(lhs, rhs, numbers)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (None, "must be.*lhs_contracting.*got None"),
        (((1,), (0,)), "must be.*four sequences of ints"),
        ((((1.5,), (0,)), ((), ())), "must be.*four sequences of ints"),
        (((("a",), (0,)), ((), ())), "must be.*four sequences of ints"),
        ((((-1,), (0,)), ((), ())), r"lhs dimensions \(-1,\).*from 0 to 1"),
        ((((1,), (2,)), ((), ())), r"rhs dimensions \(2,\).*from 0 to 1"),
        ((((1, 1), (0, 1)), ((), ())), r"lhs dimensions \(1, 1\).*distinct"),
        ((((1,), (0,)), ((0,), (0,))), r"rhs dimensions \(0, 0\).*distinct"),
        (
            (((0, 1), (0,)), ((), ())),
            r"2 contracting dimensions of lhs \(0, 1\) with 1 of rhs \(0,\)",
        ),
        ((((1,), (0,)), ((), (1,))), r"0 batch dimensions of lhs \(\) with 1 of rhs \(1,\)"),
    ],
    ids=str,
)
def test_error_dimension_numbers(numbers, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        scaled_matmul(*operands(), numbers)


@pytest.mark.slow
@implementations
@pytest.mark.parametrize("scale_shape", [(3, 1), (4,), (1, 4), (4, 1, 1), (0, 1)])
def test_error_scale_shape(scale_shape, implementation):
    lhs = ScaledArray(jnp.ones((4, 6), E4M3.dtype), jnp.ones(scale_shape))
    with pytest.raises(ValueError, match=r"data of shape \(4, 6\) cannot have a scale of shape"):
        scaled_matmul(lhs, operands()[1], PLAIN, implementation=implementation)


@implementations
def test_error_data_of_no_format(implementation):
    """Whoever takes it silently computes in f32 what the user believes to be FP8."""
    lhs = ScaledArray(jnp.ones((4, 6), jnp.float32), jnp.float32(1))
    with pytest.raises(TypeError, match=r"float32 stores none of jfp8's formats"):
        scaled_matmul(lhs, operands()[1], PLAIN, implementation=implementation)


@implementations
def test_error_result_dtype(implementation):
    with pytest.raises(TypeError, match="preferred_element_type.*floating.*int32"):
        scaled_matmul(
            *operands(), PLAIN, implementation=implementation, preferred_element_type=jnp.int32
        )


def test_blocks_that_are_cut_short_along_the_last_of_three_contracted_dimensions():
    """Six elements in blocks of four: runs of one scale are two long, or they would cross rows."""
    rng = np.random.default_rng(0)
    values = [
        rng.normal(size=(2, 3, 4, 6)) * 2.0 ** rng.integers(-6, 7, (2, 3, 4, 6)) for _ in "ab"
    ]
    a, b = (
        jfp8.quantize(jnp.asarray(v, jnp.float32), granularity=jfp8.Block((1, 1, 1, 4)))
        for v in values
    )
    numbers = (((1, 2, 3), (1, 2, 3)), ((), ()))
    y = jax.jit(
        lambda a, b: jfp8.scaled_matmul(
            a, b, numbers, implementation="emulate", accumulation="f32_every_128"
        )
    )(a, b)
    exact = [np.asarray(q.dequantize(), np.float64) for q in (a, b)]
    expected, sizes = (
        np.einsum("aijk,bijk->ab", *exact),
        np.einsum("aijk,bijk->ab", *map(abs, exact)),
    )
    assert (np.abs(y - expected) <= 80 * 2.0**-24 * sizes).all()
