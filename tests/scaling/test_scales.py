"""amax, scales and histories, held to numpy, to Fractions and to the bits of f32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, Block, PerAxis, PerTensor
from jfp8.quantizers.quantizer import Delayed
from jfp8.scaling.granularity import scale_shape
from jfp8.scaling.history import (
    believed,
    ended,
    foreseen,
    history_amax,
    init_amax_state,
    observe,
    push_amax,
    record,
)
from jfp8.scaling.scales import (
    SCALE_ROUNDINGS,
    amax,
    reciprocal,
    reciprocal_factors,
    scale_from_amax,
)
from support.arrays import assert_same

DATA_FORMATS = (E4M3FN, E5M2, E3M4, E2M1FN)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
E8M0_MODES = ("rceil", "floor", "ceil", "even")
SMALLEST_NORMAL = np.float32(2.0**-126)

data_formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
jit_amax = jax.jit(amax, static_argnums=1)
jit_scale = jax.jit(
    scale_from_amax, static_argnums=1, static_argnames=("margin", "scale_rounding", "poison")
)


def from_bits(bits) -> np.ndarray:
    return np.asarray(bits).astype(np.uint32).view(np.float32)


def normals(dtype, *shape) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 4095, 4096, 5000, 2**20])
@dtypes
def test_trap_maximum_drops_nan(size, dtype):
    """XLA:CPU's float maximum of 4096 elements and more ignores NaN."""
    clean = normals(dtype, size)
    assert_same(jit_amax(clean), np.max(np.abs(clean)).astype(np.float32))
    for position in {0, size // 2, size - 1}:
        for bad, expected in ((np.nan, np.nan), (-np.nan, np.nan), (-np.inf, np.inf)):
            x = clean.copy()
            x[position] = bad
            np.testing.assert_equal(np.asarray(jit_amax(x)), np.float32(expected))
    x[0], x[-1] = -np.inf, np.nan
    assert np.isnan(jit_amax(x))


@pytest.mark.slow
def test_trap_maximum_drops_nan_along_an_axis():
    x = normals(np.float32, 3, 8192)
    x[1, 5000] = np.nan
    expected = np.max(np.abs(x), axis=1, keepdims=True)
    np.testing.assert_array_equal(amax(x, PerAxis(0)), expected)
    assert np.isnan(expected).tolist() == [[False], [True], [False]]
    blocks = np.asarray(amax(x, Block((1, 4096))))
    assert np.isnan(blocks).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", [None, PerAxis(0), PerAxis(1), Block((2, 64))], ids=str)
def test_amax_of_a_sharded_array_is_global(granularity, mesh_of):
    mesh = mesh_of((8,), ("x",))
    x = normals(np.float32, 16, 8192)
    x[5, 100], x[3, 8000], x[15, 17] = 50.0, -np.inf, -77.0
    for bad in (3.0, np.nan):
        x[13, 7000] = bad  # lives on one of the devices only
        expected = amax(x, granularity)
        for spec in (P("x"), P(None, "x")):
            sharded = jax.device_put(x, NamedSharding(mesh, spec))
            np.testing.assert_array_equal(jit_amax(sharded, granularity), expected)
        assert np.any(np.isnan(expected)) == np.isnan(bad)
        assert not np.all(np.isfinite(expected))


@pytest.mark.slow
def test_trap_subnormals_are_not_flushed_by_amax():
    """XLA:CPU reads f32 subnormals as zero in a float maximum."""
    x = from_bits([0, 0x80000001, 7, 0x80000003])
    assert_same(amax(x), from_bits(7))
    assert_same(amax(x, PerAxis(0)), from_bits([0, 1, 7, 3]))
    assert_same(amax(np.array([-(2.0**-133), 0.0], jnp.bfloat16)), np.float32(2.0**-133))
    assert_same(amax(np.array([-(2.0**-24), 0.0], np.float16)), np.float32(2.0**-24))


@dtypes
@pytest.mark.parametrize(
    ("granularity", "axes"),
    [
        (PerTensor(), (0, 1, 2)),
        (PerAxis(0), (1, 2)),
        (PerAxis(-1), (0, 1)),
        (PerAxis((0, -2)), (2,)),
        (PerAxis((0, 1, 2)), ()),
        (PerAxis(()), (0, 1, 2)),
    ],
    ids=str,
)
def test_amax_per_axis(dtype, granularity, axes):
    x = normals(dtype, 4, 6, 8)
    expected = np.max(np.abs(x), axis=axes, keepdims=granularity != PerTensor())
    assert scale_shape(granularity, x.shape) == expected.shape
    assert_same(jit_amax(x, granularity), expected.astype(np.float32))


def test_amax_of_scalars_f8_and_nothing():
    assert_same(amax(np.zeros((0, 4), np.float32)), np.float32(0))
    assert_same(amax(np.zeros((0, 4), np.float32), PerAxis(1)), np.zeros((1, 4), np.float32))
    assert amax(np.zeros((0, 4), np.float32), Block((1, 2))).shape == (0, 2)
    assert_same(amax(-2.5), np.float32(2.5))
    assert_same(amax(np.array([1.0, -448.0], E4M3FN.dtype)), np.float32(448))
    assert np.isnan(amax(np.array([1.0, np.nan], E5M2.dtype)))
    assert_same(amax(np.array([-6.0, 1.0], E2M1FN.dtype)), np.float32(6))


def test_amax_errors():
    for x, dtype in ((np.arange(3, dtype=np.int32), "int32"), (1j * np.ones(3), "complex64")):
        with pytest.raises(TypeError, match=rf"dtype {dtype}.*floating"):
            amax(x)
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64"):
        amax(jnp.ones(3, jnp.float64))
    x = np.ones((4, 6), np.float32)
    with pytest.raises(ValueError, match=r"PerAxis\(axis=2\).*shape \(4, 6\).*-2 to 1"):
        amax(x, PerAxis(2))
    with pytest.raises(ValueError, match=r"Block\(shape=\(1, 1, 2\)\) has 3 .* only 2"):
        amax(x, Block((1, 1, 2)))
    with pytest.raises(TypeError, match=r"PerTensor\(\), PerAxis\(axis\) or Block.*'per_tensor'"):
        amax(x, "per_tensor")


def test_granularities_check_themselves():
    for wrong in (1.0, (0, "1"), True, [0]):
        with pytest.raises(TypeError, match="PerAxis takes an int or a tuple of ints"):
            PerAxis(wrong)
    for wrong in (32, [1, 32], (0, 32), (1, 2.0)):
        with pytest.raises(TypeError, match="Block takes a tuple of positive ints"):
            Block(wrong)
    assert PerAxis(0) == PerAxis(0) != PerAxis(1)
    assert len({Block((1, 2)), Block((1, 2)), PerTensor(), PerTensor()}) == 2


def all_binades(*, mantissas=None) -> np.ndarray:
    """Positive normal f32: every exponent, with every mantissa where some rounding may change."""
    if mantissas is None:
        corners = [0, 0x200000, 0x400000, 0x500000, 0x600000, 0x700000, 0x780000, 0x7FFFFF]
        near = {c + d for c in corners for d in (-1, 0, 1)}
        mantissas = sorted(m for m in near if 0 <= m < 2**23)
    exponents = np.arange(1, 255)
    grid = (exponents[:, None] << 23) | np.array(mantissas)
    anything = np.random.default_rng(0).integers(0x00800000, 0x7F800000, 2000)
    return from_bits(np.concatenate([grid.ravel(), anything]))


@pytest.mark.slow
@data_formats
@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "one by one"])
def test_trap_division_becomes_multiplication(fmt, how):
    """XLA turns ``x / broadcast(max)`` into ``x * (1 / max)``, which is off by an ulp."""
    a = all_binades()
    expected = np.maximum(a / np.float32(fmt.max), SMALLEST_NORMAL)
    assert np.sum(expected != a * (np.float32(1) / np.float32(fmt.max))) > len(a) / 20
    if how == "one by one":
        for x, y in zip(a[::500], expected[::500]):
            assert_same(jit_scale(x, fmt), y)
        return
    scale = {
        "eager": lambda a: scale_from_amax(jnp.asarray(a), fmt),
        "jit": lambda a: jit_scale(a, fmt),
        "vmap": jax.vmap(lambda a: scale_from_amax(a, fmt)),
    }[how]
    assert_same(scale(a), expected)
    assert_same(scale(a.reshape(-1, 2)), expected.reshape(-1, 2))


@data_formats
def test_scale_of_a_constant_amax_is_divided_too(fmt):
    constant = np.float32(1.7)
    scale = jax.jit(lambda: scale_from_amax(jnp.asarray(constant), fmt))()
    assert_same(scale, constant / np.float32(fmt.max))


@data_formats
@pytest.mark.parametrize("margin", [1, 3, -2])
def test_margin_is_a_power_of_two(fmt, margin):
    a = np.geomspace(1e-25, 1e25, 100).astype(np.float32)
    exact = a / np.float32(fmt.max) * np.float32(2.0**margin)
    assert_same(scale_from_amax(a, fmt, margin=margin), exact)
    assert scale_from_amax(jnp.float32(0), fmt, margin=margin) == 1
    plain, wider = (
        scale_from_amax(a, fmt, margin=m, scale_rounding="power_of_two") for m in (0, margin)
    )
    assert_same(wider, np.asarray(plain) * np.float32(2.0**margin))


@pytest.mark.parametrize("scale_rounding", [None, "power_of_two"])
@pytest.mark.parametrize("margin", [0, 8, 32])
@data_formats
def test_trap_scale_and_reciprocal_are_normal(fmt, margin, scale_rounding):
    """``1 / s`` is flushed to 0 for ``s > 2^126``, and overflows for ``s < 2^-128``."""
    a = np.concatenate([all_binades(), from_bits([0, 1, 0x7FFFFF, 0x7F7FFFFF])])
    if fmt.has_nan:
        a = np.append(a, np.array([np.inf, np.nan], np.float32))
    scale = np.asarray(jit_scale(a, fmt, margin=margin, scale_rounding=scale_rounding))
    inverse = np.asarray(reciprocal(scale))
    assert_same(inverse, np.float32(1) / scale)
    for s in (scale, inverse):
        assert np.min(s) >= 2.0**-126
        assert np.max(s) <= 2.0**126


@pytest.mark.representative(1)
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("margin", [0, 3])
@data_formats
def test_poison_makes_the_scale_of_a_bad_amax_nan(fmt, margin, scale_rounding):
    """And of no other: E8M0 scales have always been like that, and those of E2M1."""
    a = from_bits([0x7F800000, 0x7F800001, 0x7FC00000, 0, 1, 0x3F800000, 0x7F000000])
    options = {"margin": margin, "scale_rounding": scale_rounding}
    scale, plain = (
        np.asarray(jit_scale(a, fmt, poison=poison, **options)).astype(np.float32)
        for poison in (True, False)
    )
    assert np.isnan(scale).tolist() == [True] * 3 + [False] * 4
    assert_same(scale[3:], plain[3:])
    known = not fmt.has_nan or scale_rounding in E8M0_MODES
    np.testing.assert_array_equal(plain[:3], [np.nan if known else 1.0] * 3)


@pytest.mark.representative(1)
@data_formats
def test_power_of_two_scales_round_up(fmt):
    """The smallest power of two with ``amax <= scale * max``: nothing new saturates."""
    for a in (all_binades(), from_bits(np.arange(0x3F800000, 0x40000000, 3))):
        scale = np.asarray(jit_scale(a, fmt, scale_rounding="power_of_two"))
        assert scale.dtype == np.float32
        assert np.all(scale.view(np.uint32) & 0x7FFFFF == 0)
        wide = scale.astype(np.float64)
        assert np.all(a <= wide * fmt.max)
        assert np.all((a > wide / 2 * fmt.max) | (wide == 2.0**-126))


def mx_code_by_bits(a, fmt, mode: str) -> np.ndarray:
    """The code from the fields of amax in integers, as MX hardware has it."""
    bits = a.view(np.uint32).astype(np.int64)
    e, t, emax = bits >> 23, bits & 0x7FFFFF, math.frexp(fmt.max)[1] - 1
    top = {E4M3FN: 0x600000, E5M2: 0x600000, E3M4: 0x700000, E2M1FN: 0x400000}[fmt]
    field = (bits + (1 << (22 - fmt.mantissa_bits))) >> 23
    code = {"floor": e, "ceil": e + (t > 0), "even": field, "rceil": e + (t > top)}[mode] - emax
    invalid = (bits >= 0x7F800000) | ((mode == "even") & (field == 255))
    return np.where(invalid, 255, np.maximum(code, 0))


PART = 1 << 20  # codes at a time, or NumPy's integers take half a gigabyte


@data_formats
@pytest.mark.parametrize("mode", E8M0_MODES)
def test_e8m0_scales_of_every_mantissa(fmt, mode):
    """Of one binade (every 31st but for the default), the ends of the range, and all corners."""
    step = 1 if (fmt, mode) == (E4M3FN, "rceil") else 31
    bits = [np.arange(0x41000000, 0x41800000, step), np.arange(0x7F700000, 0x7F800000, 0x1001)]
    bits += [np.arange(0x7F7FFFF0, 0x7F800010), np.arange(0, 0x06000000, 0x40001)]
    a = np.concatenate([from_bits(np.concatenate(bits)), all_binades()])
    parts = -(-a.size // PART)
    for part in np.resize(a, (parts, PART)) if parts > 1 else [a]:
        codes = np.asarray(jit_scale(part, fmt, scale_rounding=mode)).view(np.uint8)
        np.testing.assert_array_equal(codes, mx_code_by_bits(part, fmt, mode))


def test_rceil_is_the_rule_of_other_libraries():
    """``ceil(log2(amax / 448))``, the smallest power of two that is at least the ratio.

    torchao and Transformer Engine take it from the bits of the f32 ratio: its exponent, and one
    more for any mantissa. Where the ratio is a subnormal f32, and so rounded once more, only the
    exact one is the oracle.
    """
    a = all_binades()
    codes = np.asarray(jit_scale(a, E4M3FN, scale_rounding="rceil")).view(np.uint8)
    exact = np.ceil(np.log2(a.astype(np.float64) / 448)) + 127
    np.testing.assert_array_equal(codes, np.maximum(exact, 0))
    ratio = (a * np.float32(1 / 448)).view(np.uint32).astype(np.int64)
    exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
    theirs = exponent + (mantissa > 0)
    normal = exponent > 0
    assert normal.mean() > 0.9
    np.testing.assert_array_equal(codes[normal], theirs[normal])


@pytest.mark.slow
@pytest.mark.parametrize("mode", E8M0_MODES)
def test_e8m0_margin_is_added_to_the_code(mode):
    a = all_binades(mantissas=[0, 0x123456])
    plain, *moved = (
        np.asarray(jit_scale(a, E4M3FN, margin=margin, scale_rounding=mode)).view(np.uint8)
        for margin in (0, 1, 30, -30)
    )
    assert np.sum(plain != 255) > 500
    for codes, margin in zip(moved, (1, 30, -30)):
        clipped = np.clip(plain.astype(int) + margin, 0, 254)
        np.testing.assert_array_equal(codes, np.where(plain == 255, 255, clipped))


def test_unknown_scale_rounding_lists_the_known():
    for wrong in ("nearest", "pow2", 1, ""):
        with pytest.raises(ValueError, match=r"unknown.*None, 'power_of_two', 'rceil', 'floor'"):
            scale_from_amax(jnp.float32(1), E4M3FN, scale_rounding=wrong)


@pytest.mark.slow
def test_trap_e8m0_reciprocals():
    """254 - c for every code; 1 / 2^127 is an f32 subnormal, so it comes as two factors."""
    codes = np.arange(256, dtype=np.uint8)
    for function in (reciprocal_factors, jax.jit(reciprocal_factors)):
        factors = [np.asarray(f) for f in function(codes.view(E8M0FNU.dtype))]
        sizes = np.abs(np.array([f[:255] for f in factors]))
        assert np.all((sizes >= SMALLEST_NORMAL) & np.isfinite(sizes))
        product = np.prod(np.array(factors, np.float64), axis=0)
        np.testing.assert_array_equal(product[:255], np.ldexp(1.0, 127 - np.arange(255)))
        assert np.isnan(product[255])


def values(state) -> tuple[list, list]:
    return state["amax_history"].tolist(), state["amax"].tolist()


def test_history_is_newest_first():
    state = init_amax_state(3)
    assert values(state) == ([0, 0, 0], 0)
    for amaxes, history in (
        ([1.0], [1, 0, 0]),
        ([5.0, 2.0], [5, 1, 0]),
        ([3.0, 4.0], [4, 5, 1]),
        ([0.5], [0.5, 4, 5]),
    ):
        for a in amaxes:
            state = observe(state, jnp.float32(a))
        assert values(state)[1] == max(amaxes)
        state = ended(state)
        assert values(state) == (history, 0)


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan, -1.0])
def test_trap_bad_amax_stays_out_of_the_history(bad):
    """One Inf in the window would freeze the scale for its whole length; zero predicts nothing."""
    history = jnp.array([3.0, 2.0, 1.0])
    assert push_amax(history, jnp.float32(bad)).tolist() == [3, 2, 1]
    assert push_amax(history, jnp.float32(7)).tolist() == [7, 3, 2]
    assert push_amax(history[:1], jnp.float32(7)).tolist() == [7]
    state = {"amax_history": history, "amax": jnp.float32(0)}
    seen = observe(state, jnp.float32(bad))
    assert values(seen) == ([3, 2, 1], 0)
    assert values(ended(seen)) == ([3, 2, 1], 0)
    seen = observe(observe(seen, jnp.float32(4)), jnp.float32(bad))
    assert values(seen) == ([3, 2, 1], 4)
    assert values(ended(seen)) == ([4, 3, 2], 0)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_use_that_sees_nothing_changes_nothing(at_once):
    state = lambda history, amax: {"amax_history": jnp.float32(history), "amax": jnp.float32(amax)}
    product = {"lhs": state([4, 2], 0), "rhs": state([1, 1], 0), "grad": state([3, 3], 5)}

    def after(*amaxes):
        found = dict(zip(("lhs", "rhs"), jnp.float32(amaxes)))
        return record(product, product, found, at_once=at_once)

    assert_same(after(0, 0), product)
    recorded = state([8, 4], -8), state([2, 1], -2)
    lhs, rhs = recorded if at_once else (state([4, 2], 8), state([1, 1], 2))
    assert_same(after(8, 2), {**product, "lhs": lhs, "rhs": rhs})


def test_history_amax():
    history = np.float32([[1, 4, 2], [0, 0, 0]])
    found = jax.jit(history_amax, static_argnums=1)
    for algorithm, expected in (("max", [4, 0]), ("most_recent", [1, 0])):
        assert found(history, algorithm).tolist() == expected
        assert found(history[0], algorithm) == expected[0]


@pytest.mark.parametrize("bad", [np.inf, np.nan, -5.0])
def test_no_entry_that_is_no_amax_is_read(bad):
    """A state that was in float16 holds Inf: kernels' gradients were 0 for 16 steps."""
    found = [history_amax(np.float32([bad, 2, 3]), how).tolist() for how in ("max", "most_recent")]
    assert found == [3, 0]
    assert believed(np.float32([4, bad, 2])).tolist() == [4, 0, 2]
    delayed = Delayed(E4M3FN, length=2)
    for history, running in (([bad, bad], 0), ([bad, bad], bad), ([7, bad], 0), ([3, 7], bad)):
        state = {"amax_history": jnp.float32(history), "amax": jnp.float32(running)}
        assert delayed.scale(jnp.float32(7), state) == np.float32(7) / np.float32(448)


def test_a_jump_is_not_believed():
    """A history with one is empty while it is the newest entry, and then without it."""
    for history, expected in (
        ([17, 1, 2], [0, 0, 0]),
        ([16, 1, 2], [16, 1, 2]),
        ([1, 17, 2], [1, 0, 2]),
        ([17, 17, 2], [17, 17, 2]),
        ([1, 2, 17], [1, 2, 0]),
        ([17, 0, 0], [17, 0, 0]),
        ([17], [17]),
    ):
        rows = np.float32([history, [3] * len(history)])
        assert believed(rows).tolist() == [expected, [3] * len(history)]


def test_a_weight_that_grew_is_expected_to_grow_again():
    """By as much, at most twofold; one that was zero doubles, if there was a step before."""
    weight = np.float32([[3, 2], [5, 2], [2.05, 2], [3, 0], [1.5, 0]])
    other = np.float32([[1, 1]] * 4 + [[1, 0]])
    expected = np.float32([[4.5, 2], [10, 2], [2.05, 2], [6, 0], [1.5, 0]])
    np.testing.assert_array_equal(foreseen(weight, other), expected)
    np.testing.assert_array_equal(foreseen(weight[:, :1], other[:, :1]), weight[:, :1])
