"""Targets and rows of `TwoLevel`, held to brute force in float64, ml_dtypes and numpy's f32."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import E2M1FN, E4M3FN
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import MatmulSpec
from jfp8.quantizers import Context, TwoLevel
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.scales import amax

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
widths = pytest.mark.parametrize("free", [1, pytest.param(16, marks=pytest.mark.slow)])
axes = pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.slow), 1])
FOUR_OVER_SIX = TwoLevel(E2M1FN, (16, 1), targets=(6.0, 4.0), reach=256 * 6.0)


@partial(jax.jit, static_argnums=(0, 2))
def quantized(quantizer, x, axis=1):
    return quantizer(x, Context((axis,), amax(x), None, jnp.zeros(2, jnp.uint32)))


def values(q):
    return np.asarray(q.dequantize(), np.float64)


def candidate(blocks, target, whole):
    """Scale, codes and values for blocks f32[n, size]: ``s = e4m3(amax / t * 1536 / whole)``."""
    f32 = np.float32
    S = f32(1536) / f32(whole)
    s = (abs(blocks).max(1, keepdims=True) / f32(target) * S).astype(E4M3).astype(f32)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(f32(1) / (s / S), np.finfo(f32).max)
    data = np.clip(blocks * inverse, -6, 6).astype(E2M1)
    return s, data, data.astype(np.float64) * s * np.float64(f32(1) / S)


def as_blocks(x, shape):
    rows, columns = shape
    x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return x.transpose(0, 2, 1, 3).reshape(-1, rows * columns)


def heavy(shape, seed=0):
    """Student t with 3 degrees of freedom, in blocks of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(-6, 0, (shape[0] // 16, 1, shape[1] // 16, 1)))
    x = rng.standard_t(3, (shape[0] // 16, 16, shape[1] // 16, 16)) * sizes
    return x.reshape(shape).astype(np.float32)


@widths
def test_each_block_takes_the_target_that_loses_less(free):
    """Brute force over both, in float64.

    Errors count in units of ``u = s / 2^14``. One is off by at most u/2, so a sum of n squares E by
    at most ``u sqrt(n E) + n u^2 / 4``; only where the two are closer may either be taken.
    """
    x = heavy((64, 512))
    x[:32] = np.random.default_rng(1).uniform(-2, 2, (32, 512))  # few of 256 others are large
    quantizer = TwoLevel(E2M1FN, (16, free), targets=(6.0, 4.0), reach=256 * 6.0)
    q = quantized(quantizer, x)
    blocks = as_blocks(x, (free, 16))
    n, whole = blocks.shape[1], abs(x).max()
    tried = [candidate(blocks, target, whole) for target in (6, 4)]
    errors = [((y - blocks) ** 2).sum(1) for *_, y in tried]
    units = [s[:, 0] * np.float64(whole / 1536) / 2**14 for s, *_ in tried]
    doubt = sum(u * np.sqrt(n * e) + n * u**2 / 4 for u, e in zip(units, errors))
    found = np.asarray(q.scale.data).astype(np.float32).reshape(-1)
    six, four = (s[:, 0] for s, *_ in tried)
    surely_four, surely_six = errors[1] < errors[0] - doubt, errors[0] < errors[1] - doubt
    np.testing.assert_array_equal(found[surely_four], four[surely_four])
    np.testing.assert_array_equal(found[surely_six], six[surely_six])
    assert np.mean(surely_four | surely_six) > 0.995
    assert min(surely_four.mean(), surely_six.mean()) > 0.15
    assert ((found == four) | (found == six)).all()
    chosen = np.where((found == four)[:, None], tried[1][2], tried[0][2])
    np.testing.assert_allclose(as_blocks(values(q), (free, 16)), chosen, rtol=1e-6, atol=0)
    assert (chosen == 0).mean() < 0.5


def of_one_block(*given):
    """The scale of a block of 16, the others zeros, beside one whose amax gives S = 1."""
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1, : len(given)] = 1536, given
    q = quantized(FOUR_OVER_SIX, x)
    assert float(q.scale.scale) == 1
    return float(np.asarray(q.scale.data).astype(np.float32)[1, 0]), values(q)[1]


@pytest.mark.parametrize(
    ("given", "scale", "kept"),
    [
        ((6, 5), 1.5, (6, 4.5)),  # 5 is halfway between 4 and 6, but nearly 3 times 1.5
        ((6, 4, 2), 1, (6, 4, 2)),
        ((6, 3, -1.5), 1, (6, 3, -1.5)),  # exact under both: 6
        ((), 0, ()),  # zeros are, too
        ((6, 4.75), 1.5, (6, 4.5)),  # 1/16 against 9/16
        ((6, 4.25), 1, (6, 4)),  # 1/16 under both: 6
        # The smallest scale is 2^-9. 6 needs less than half of that, and would lose all.
        ((2.0**-8 * 1.4,), 2.0**-9, (2.0**-9 * 3,)),
    ],
)
def test_blocks_done_by_hand(given, scale, kept):
    found, y = of_one_block(*given)
    assert found == scale
    np.testing.assert_array_equal(y[: len(kept)], kept)


@pytest.mark.slow
def test_of_equal_targets_the_first_is_taken():
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1, :3] = 1024, (6, 3, 1.5)
    first_four = TwoLevel(E2M1FN, (16, 1), targets=(4.0, 6.0), reach=1024.0)
    assert float(quantized(first_four, x).scale.data[1, 0]) == 1.5


@pytest.mark.slow
def test_the_choice_does_not_depend_on_random_bits():
    """So that stochastic rounding is unbiased: a draw must not choose its own scale."""
    x = heavy((16, 256))
    stochastic = TwoLevel(E2M1FN, (16, 1), targets=(6.0, 4.0), reach=1536.0, rounding="stochastic")
    q, nearest = quantized(stochastic, x), quantized(FOUR_OVER_SIX, x)
    codes = [np.asarray(each.scale.data).view(np.uint8) for each in (q, nearest)]
    np.testing.assert_array_equal(*codes)
    assert np.any(values(q) != values(nearest))


BY_ROW = TwoLevel(E2M1FN, (16, 1), outer="row")


@axes
def test_each_row_is_a_tensor_of_its_own(axis):
    """To the bit that of a tensor with nothing but this row, along either direction."""
    x = heavy((48, 80)) * np.exp2(np.arange(48) % 30).astype(np.float32)[:, None]
    q = values(quantized(BY_ROW, x, axis))
    rows = np.moveaxis(x, axis, 1)
    plain = TwoLevel(E2M1FN, (16, 1))
    alone = jax.jit(jax.vmap(lambda row: plain(row, Context((1,), amax(row))).dequantize()))
    expected = np.asarray(alone(rows[:, None]), np.float64)[:, 0]
    np.testing.assert_array_equal(np.moveaxis(q, axis, 1), expected)
    assert np.linalg.norm(q - x) < 0.2 * np.linalg.norm(x)


@pytest.mark.slow
def test_sums_over_two_dimensions_in_parts():
    """The outer scale is merged with the data where sums are promoted every 128 terms."""
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.normal(size=(5, 8, 32)), E2M1FN.dtype)
    narrow = jnp.asarray(rng.uniform(1, 100, (5, 8, 2)), E4M3FN.dtype)
    outer = jnp.asarray(rng.uniform(1, 9, (5, 1, 1)), jnp.float32)
    lhs = ScaledArray(data, ScaledArray(narrow, outer))
    rhs = jfp8.quantize(rng.normal(size=(8, 32, 7)).astype(np.float32))
    numbers = (((1, 2), (0, 1)), ((), ()))
    spec = MatmulSpec(numbers, np.dtype(np.float32), "f32_every_128", False, False)
    y = Planner().multiply(lhs, rhs, spec)
    exact = np.einsum("mij,ijn->mn", values(lhs), values(rhs))
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * abs(exact).max())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"targets": 6.0}, r"targets=6\.0: must be a tuple of positive numbers, such as \(6"),
        ({"targets": (6.0, 0.0)}, r"targets=\(6\.0, 0\.0\): must be a tuple of positive"),
        ({"reach": -1.0}, r"reach=-1\.0: must be None or a positive number"),
        ({"reach": 3000.0}, r"reach=3000\.0: .*up to 500, but E4M3FN ends at 448.* at most 2688"),
        ({"targets": (6.0, 4.0)}, "up to 672, but E4M3FN ends at 448.*at most 1792"),
        (
            {"targets": (6.0, 4.0), "reach": 1536.0, "block_size": (32, 32)},
            r"block_size=\(32, 32\): errors are compared for E2M1FN in blocks of at most 256",
        ),
        ({"outer": "token"}, "outer='token' is unknown. Allowed: 'tensor', 'row'"),
        (
            {"outer": "row", "block_size": (16, 16)},
            r"outer='row' with block_size=\(16, 16\): .*Use block_size=\(16, 1\)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_fields_are_checked(fields, words):
    with pytest.raises(ValueError, match=words):
        TwoLevel(E2M1FN, **fields)
