"""`scaled_matmul` and its backends: one suite for all, held to products in float64 and int64."""

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


# Dimension numbers, scales and formats are drawn in tests/properties.


def matmul(lhs, rhs, numbers=PLAIN, **options):
    return jax.jit(lambda l, r: scaled_matmul(l, r, numbers, **options))(lhs, rhs)


def e8m0(codes):
    return codes_to_format(jnp.asarray(codes, jnp.uint8), jfp8.E8M0FNU)


def test_dimension_numbers_may_be_lists_of_numpy_integers():
    whole = {"scale_rounding": "power_of_two"}
    lhs, rhs = (quantize(x, **whole) for x in np.float32([np.eye(3), [[1, 2, 4]] * 3]))
    numbers = [[[np.int64(1)], np.array([0])], [[], []]]
    np.testing.assert_array_equal(scaled_matmul(lhs, rhs, numbers), rhs.dequantize())


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


def operands():
    return quantize(jnp.ones((4, 6))), quantize(jnp.ones((6, 5)))


@pytest.mark.parametrize("which", ["lhs", "rhs"])
def test_error_not_scaled(which):
    pair = dict(zip(("lhs", "rhs"), operands(), strict=True)) | {which: jnp.ones((6, 6))}
    with pytest.raises(TypeError, match=rf"{which} must be a ScaledArray.*jfp8\.quantize"):
        scaled_matmul(**pair, dimension_numbers=PLAIN)


def test_error_unknown_implementation_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown. Allowed: 'emulate', 'bf16', 'xla', .*'mosaic_tpu', or None"
    ):
        scaled_matmul(*operands(), PLAIN, implementation="cuda")


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
        (((("a",), (0,)), ((), ())), "must be.*four sequences of ints"),
        ((((0, -1), (0, 1)), ((), ())), r"lhs dimensions \(0, -1\).*from 0 to 1"),
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
