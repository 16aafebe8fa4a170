"""Products in blocks by `jax.nn.scaled_matmul`: JAX's lowering for CPUs, and that for CUDA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8.kernels.backend import facts_of
from jfp8.kernels.blackwell.backend import MX, NVFP4, as_e8m0, by_blackwell, scaled_matmul
from jfp8.matmul.spec import MatmulSpec
from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.quantizer import Context
from jfp8.scaling.scales import amax
from support.arrays import standard_normal as normal

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = {"e4m3fn x e4m3fn": (E4M3, E4M3), "e5m2 x e4m3fn": (E5M2, E4M3), "mixed": (E4M3, E5M2)}
executes = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 has no such product on CPUs"
)
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def powers(seed, shape, low=-9, high=9):
    return jnp.asarray(2.0 ** np.random.default_rng(seed).integers(low, high, shape), E8M0)


def f64(x, scale=None):
    x = np.asarray(x).astype(np.float64)
    if scale is None:
        return x
    return x * np.repeat(np.asarray(scale).astype(np.float64), 32, axis=1)[:, : x.shape[1]]


@executes
@pairs
@pytest.mark.parametrize(("m", "n", "k"), [(16, 24, 64), (7, 130, 100), (1, 1, 1)])
def test_against_float64(pair, m, n, k):
    """Products are exact in f32; sums are not."""
    blocks = -(-k // 32)
    a, b = normal(0, (m, k), pair[0]), normal(1, (n, k), pair[1])
    s, t = powers(2, (m, blocks)), powers(3, (n, blocks))
    y = scaled_matmul(a, b, s, t, F32)
    assert (y.shape, y.dtype) == ((m, n), F32)
    a, b = f64(a, s), f64(b, t)
    np.testing.assert_array_less(
        np.abs(f64(y) - a @ b.T), k * 2.0**-24 * (np.abs(a) @ np.abs(b).T) + 1e-30
    )
    assert np.all(y)


@executes
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_scales_that_the_result_dtype_does_not_hold(out_dtype):
    """57344 * 2^100 is no f16, and 2^-120 is none either: they are scaled in a wider dtype."""
    a, b = jnp.full((8, 32), 57344.0, E5M2), jnp.full((16, 32), 1.75, E4M3)
    s, t = jnp.full((8, 1), 2.0**100, E8M0), jnp.full((16, 1), 2.0**-120, E8M0)
    y = scaled_matmul(a, b, s, t, out_dtype)
    assert y.dtype == out_dtype
    np.testing.assert_array_equal(f64(y), np.full((8, 16), 57344 * 1.75 * 32 * 2.0**-20))


@executes
def test_nan_and_infinity_stay_in_their_row():
    a, b = np.ones((4, 64), E5M2), np.ones((8, 64), E4M3)
    a[1, 3], a[2, 5] = np.nan, np.inf
    s, t = np.ones((4, 2), E8M0), np.ones((8, 2), E8M0)
    t[6, 1] = np.nan
    y = scaled_matmul(*map(jnp.asarray, (a, b, s, t)), F32)
    expected = np.full((4, 8), 64.0)
    expected[1], expected[2], expected[:, 6] = np.nan, np.inf, np.nan
    np.testing.assert_array_equal(y, expected)


def test_nothing_to_multiply():
    for m, n, k in ((0, 4, 32), (4, 0, 32), (4, 4, 0)):
        a, b = jnp.ones((m, k), E4M3), jnp.ones((n, k), E4M3)
        s, t = jnp.ones((m, k // 32), E8M0), jnp.ones((n, k // 32), E8M0)
        y = scaled_matmul(a, b, s, t, BF16)
        assert y.dtype == BF16
        np.testing.assert_array_equal(y, np.zeros((m, n), BF16))


# Operands in blocks that are several of those that the hardware knows


def in_blocks(shape, block, seed=0):
    """Small integers in E4M3, times powers of two from 1/4 to 4 in f32, one for each block."""
    rng = np.random.default_rng(seed)
    data = jnp.asarray(rng.integers(-8, 9, shape), E4M3)
    scales = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    return jfp8.ScaledArray(data, jnp.asarray(2.0 ** rng.integers(-2, 3, scales), F32), block)


def values(q):
    """``data * scale`` in float64; element i has scale i // b."""
    scale = np.asarray(q.scale, np.float64)
    at = np.ix_(*(np.arange(n) // b for n, b in zip(q.shape, q.block, strict=True)))
    return f64(q.data) * scale[at]


def test_every_power_of_two_is_exact_and_nothing_else_is():
    exact = 2.0 ** np.arange(-126, 128, dtype=np.float64)
    np.testing.assert_array_equal(f64(as_e8m0(jnp.asarray(exact, F32))), exact)
    others = [0.0, 2.0**-127, 2.0**-149, -1.0, 1.5, np.nextafter(F32(2), F32(0)), np.inf, np.nan]
    codes = as_e8m0(jnp.asarray(np.asarray(others, np.float32)))
    assert np.isnan(f64(codes)).all()
    stored = jnp.asarray([2.0**-127, 2.0, np.nan], E8M0)
    assert as_e8m0(stored) is stored


@executes
@pytest.mark.parametrize("numbers", [(((1,), (0,)), ((), ())), (((0,), (1,)), ((), ()))], ids=str)
def test_product_in_larger_blocks(numbers):
    """300 products of at most 64, times at most 16, are integers below 2^24 over 16: exact."""
    (k_lhs,), (k_rhs,) = numbers[0]
    lhs = in_blocks((40, 300) if k_lhs else (300, 40), (1, 128) if k_lhs else (128, 1))
    rhs = in_blocks((300, 260) if k_rhs == 0 else (260, 300), (128, 128), seed=1)
    y = by_blackwell(MX, lhs, rhs, MatmulSpec(numbers, np.dtype(np.float32), "f32", False, True))
    a, b = (values(lhs) if k_lhs else values(lhs).T), (values(rhs) if k_rhs == 0 else values(rhs).T)
    np.testing.assert_array_equal(f64(y), a @ b)
    assert np.abs(a @ b).max() > 100


@executes
def test_every_pair_of_codes_and_scales():
    """All 16 codes with all 127 finite scales, by one another: products of 12 bits are exact."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    data = np.zeros((16 * 127, 16), codes.dtype)
    data[:, 5], scale = np.tile(codes, 127), np.repeat(scales, 16)[:, None]
    a, s = jnp.asarray(data), jnp.asarray(scale)
    y = jax.jit(scaled_matmul, static_argnums=4)(a, a, s, s, F32)
    x = data[:, 5].astype(np.float64) * scale[:, 0].astype(np.float64)
    np.testing.assert_array_equal(f64(y), np.outer(x, x))
    assert len(np.unique(x)) > 300


def two_levels(shape, block, contract, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F32)
    return TwoLevel(jfp8.E2M1FN, block)(x, Context((contract,), amax(x)))


def nvfp4_values(q):
    """``data * scale * outer scale`` in float64; element i has scale i // b."""
    return values(jfp8.ScaledArray(q.data, q.scale.data, q.block_sizes())) * float(q.scale.scale)


@executes
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_product_in_nvfp4(dtype, batch):
    """Exact products; 72 roundings of f32 sums, two of the scales' product, one of the result."""
    lhs, rhs = two_levels((40, 72), (16, 1), 1, 0), two_levels((72, 24), (16, 16), 0, 1)
    a, b = nvfp4_values(lhs), nvfp4_values(rhs)
    job = MatmulSpec((((1,), (0,)), ((), ())), np.dtype(dtype), "f32", False, False)
    product = lambda lhs, rhs: by_blackwell(NVFP4, lhs, rhs, job)
    y = (
        jax.vmap(product)(*jax.tree.map(lambda x: x[None], (lhs, rhs)))[0]
        if batch
        else product(lhs, rhs)
    )
    assert y.dtype == dtype
    bound = 75 * 2.0**-24 * (abs(a) @ abs(b)) + float(jnp.finfo(dtype).eps) / 2 * abs(a @ b)
    np.testing.assert_array_less(abs(f64(y) - a @ b), bound)
    assert abs(a @ b).max() > 5


@executes
def test_each_matrix_of_a_batch_has_its_own_outer_scale():
    """As the groups of a grouped product; the other operand has one for all."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 24, 32)), F32)
    x = x * jnp.array([1.0, 100.0])[:, None, None]
    each = jax.vmap(lambda x: TwoLevel(jfp8.E2M1FN, (16, 1))(x, Context((1,), amax(x))))(x)
    outer = each.scale.scale.reshape(2, 1, 1)
    lhs = jfp8.ScaledArray(each.data, jfp8.ScaledArray(each.scale.data, outer))
    rhs = TwoLevel(jfp8.E2M1FN, (16, 1))(x, Context((2,), amax(x)))
    job = MatmulSpec((((2,), (2,)), ((0,), (0,))), np.dtype(F32), "f32", False, False)
    assert facts_of(lhs, rhs, job).blocks == ((16, 1), (16, 1))
    y = by_blackwell(NVFP4, lhs, rhs, job)
    repeat = lambda q: f64(q.data) * np.repeat(f64(q.scale.data), 16, axis=2)
    a, b = repeat(lhs) * f64(outer), repeat(rhs) * float(rhs.scale.scale)
    expected = np.einsum("gik,gjk->gij", a, b)
    bound = 40 * 2.0**-24 * np.einsum("gik,gjk->gij", abs(a), abs(b))
    np.testing.assert_array_less(abs(f64(y) - expected), bound)
    assert abs(expected[1]).max() > 100 * abs(expected[0]).max()
