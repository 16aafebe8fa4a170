"""quantize: its bytes and scales held to numpy and ml_dtypes, its error to half a step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfp8 import (
    E2M1FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    Block,
    PerAxis,
    PerTensor,
    ScaledArray,
    dequantize,
    quantize,
)
from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.quantization import two_level_scale
from jfp8.scaling.scales import amax
from support.arrays import assert_same, codes, spread
from support.devices import traced_for

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ROUNDINGS = ("nearest_even", "stochastic")
GRANULARITIES = (
    PerTensor(),
    PerAxis(0),
    PerAxis(1),
    PerAxis((0, 1)),
    Block((1, 16)),
    Block((2, 8)),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
STATIC = ("granularity", "scale_rounding", "rounding")
jit_quantize = jax.jit(quantize, static_argnums=1, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnums=1, static_argnames=STATIC)
def there_and_back(x, fmt, **options):
    q = quantize(x, fmt, **options)
    return q, dequantize(q)


def sample(dtype=jnp.float32, shape=(8, 64)) -> np.ndarray:
    """Several binades, so that rows, columns and blocks differ in amax, and some subnormals."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, shape))
    return x.astype(dtype)


def blocks_of(granularity, shape) -> tuple[int, ...]:
    """Shape of what shares a scale, from the documentation of the granularities."""
    if granularity == PerTensor():
        return shape
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        kept = {axis % len(shape) for axis in axes}
        return tuple(1 if axis in kept else n for axis, n in enumerate(shape))
    return (1,) * (len(shape) - len(granularity.shape)) + granularity.shape


def padded(x, blocks) -> np.ndarray:
    """`x` with zeros behind it, up to whole blocks."""
    missing = [(0, -n % b if b else 0) for n, b in zip(x.shape, blocks)]
    return np.pad(x, missing) if missing else x


def block_amax(x, granularity) -> np.ndarray:
    """One maximum per block; 0-d for PerTensor."""
    a = np.abs(x.astype(np.float32))
    if granularity == PerTensor():
        return np.max(a, initial=0)
    blocks = blocks_of(granularity, a.shape)
    a = padded(a, blocks)
    parts, axes = [], []
    for n, b in zip(a.shape, blocks):
        axes.append(len(parts) + 1)
        parts += [n // b if b else 1, b]
    return np.max(a.reshape(parts), axis=tuple(axes), initial=0)


def expected_scale(x, fmt, granularity) -> np.ndarray:
    a = block_amax(x, granularity)
    scale = np.maximum(a / np.float32(fmt.max), np.float32(2.0**-126))
    bad = np.float32(np.nan if isinstance(granularity, Block) else 1)
    scale = np.where(np.isfinite(a), np.where(a > 0, scale, np.float32(1)), bad)
    return scale.astype(np.float32)


def expected_data(x, fmt, scale, block=None) -> np.ndarray:
    """``cast(x * (1 / scale))`` by numpy and ml_dtypes; NaN where x is not finite."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * (np.float32(1) / spread(scale, x.shape, block))
        scaled = np.where(np.isfinite(x.astype(np.float32)), scaled, np.float32(np.nan))
        return np.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)


def assert_bitwise(actual, expected):
    """Equal bits, but for the payload of NaN."""
    assert_same(np.asarray(actual), np.asarray(expected))


def assert_quantized(q, x, fmt, granularity):
    scale = expected_scale(x, fmt, granularity)
    assert_bitwise(q.scale, scale)
    assert_bitwise(q.data, expected_data(x, fmt, scale, q.block))


@pytest.mark.parametrize(
    ("granularity", "fmt"),
    [*((granularity, E4M3FN) for granularity in GRANULARITIES), (PerTensor(), E5M2),
     (Block((1, 16)), E2M1FN)],
    ids=str,
)  # fmt: skip
def test_the_largest_element_of_a_block_becomes_the_largest_value(granularity, fmt):
    largest = {E4M3FN: 448, E5M2: 57344, E2M1FN: 6}[fmt]
    data = np.abs(np.asarray(quantize(sample(), fmt, granularity=granularity).data, np.float32))
    assert np.all(block_amax(data, granularity) == largest)


def test_f8_inputs_are_quantized_by_value():
    x = np.array([1.0, -57344.0, 2.0**-16], E5M2.dtype)
    q = quantize(x, E4M3FN)
    assert_quantized(q, x, E4M3FN, PerTensor())
    bad = np.array([1.0, np.nan, np.inf], E5M2.dtype)
    data = np.asarray(quantize(bad, E4M3FN).data).astype(np.float32)
    assert np.isnan(data).tolist() == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 253, 254])
def test_trap_constant_factors_are_multiplied_first(code):
    """XLA turns ``(x * 2^-63) * 2^-64`` into ``x * 2^-127``, and so into zero, if it knows both."""
    scale = jnp.asarray(np.array(code, np.uint8).view(E8M0FNU.dtype))
    x = np.ldexp([1.5, -1.75, 1.0 if code else 2.0], max(code, 1) - 127).astype(np.float32)
    q = jax.jit(lambda x: quantize(x, scale=scale))(x)
    exact = x.astype(np.float64) * 2.0 ** (127 - code)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float64), exact)


@pytest.mark.parametrize("scale", [0.25, np.float64(0.25), np.array(0.25, np.float16)], ids=repr)
def test_given_scales_are_kept_in_f32(scale):
    q = quantize(np.array([1.0, 3.0], np.float32), scale=scale)
    assert_bitwise(q.scale, np.float32(0.25))
    assert np.asarray(q.data).astype(np.float32).tolist() == [4, 12]


@pytest.mark.parametrize("scale", [None, np.float32(0.125)], ids=["current", "given"])
@pytest.mark.parametrize(
    ("fmt", "dtype", "granularity"),
    [(E4M3FN, dtype, PerTensor()) for dtype in DTYPES]
    + [(E5M2, jnp.float32, g) for g in (PerTensor(), PerAxis(0), Block((1, 16)))],
    ids=lambda v: getattr(v, "__name__", None) or str(v),
)
def test_trap_nan_and_inf_do_not_vanish(fmt, scale, dtype, granularity):
    """Casts in hardware saturate Inf, and some turn NaN into the largest value too."""
    x = sample(dtype)
    x[0, 3], x[2, 60], x[5, 0] = np.nan, np.inf, -np.inf
    q, values = there_and_back(x, fmt, granularity=granularity, scale=scale)
    used = expected_scale(x, fmt, granularity) if scale is None else scale
    assert_bitwise(q.scale, used)
    assert_bitwise(q.data, expected_data(x, fmt, used))
    lost = ~np.isfinite(x.astype(np.float32))
    if isinstance(granularity, Block) and scale is None:  # with all that shares a scale with them
        lost = spread(block_amax(lost, granularity) > 0, x.shape)
    np.testing.assert_array_equal(np.isnan(values), lost)


# Every pair of a granularity and a scale, and each of these with each rounding and format.
@pytest.mark.parametrize(
    ("granularity", "scale", "rounding", "fmt"),
    [
        (granularity, scale, ROUNDINGS[(i + j) % 2], (E4M3FN, E5M2)[(i + 2 * j) % 3 == 1])
        for i, granularity in enumerate((PerTensor(), PerAxis(1), Block((1, 16))))
        for j, scale in enumerate((None, np.float32(0.125), np.float32(2.0**-120)))
    ],
    ids=str,
)
def test_trap_nothing_else_comes_of_what_is_traced_for_a_gpu(granularity, scale, rounding, fmt):
    """Instructions convert there, and arithmetic finds Inf, where bits are looked at here."""
    x = sample()
    x[0, 3], x[1, 60], x[2, 60], x[5, 0] = np.nan, -np.nan, np.inf, -np.inf
    x[3, :4] = 0.0, -0.0, np.finfo(np.float32).max, -np.finfo(np.float32).max
    options = {"granularity": granularity, "scale": scale, "rounding": rounding}
    expected = quantize(x, fmt, key=jax.random.key(0), **options)
    with traced_for():
        q = quantize(x, fmt, key=jax.random.key(0), **options)
    assert_bitwise(q.scale, expected.scale)
    assert_bitwise(q.data, expected.data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("granularity", "scale_rounding"),
    [(PerTensor(), None), (PerAxis(0), None), (Block((1, 16)), "rceil")],
    ids=str,
)
def test_vmap_quantizes_each_as_if_it_were_alone(granularity, scale_rounding):
    """Bit for bit, which a division that XLA rewrites for broadcast operands would not be."""
    x = sample(shape=(5, 4, 32))
    x *= np.array([1.0, 1.1, 1.3, 1.7, 0.9], np.float32)[:, None, None]

    def each(x):
        q = quantize(x, granularity=granularity, scale_rounding=scale_rounding)
        return q.data, q.scale.astype(jnp.float32)

    alone = [np.stack(a) for a in zip(*map(jax.jit(each), x), strict=True)]
    for mapped in (jax.vmap(each)(x), jax.jit(jax.vmap(each))(x)):
        assert_bitwise(mapped[0], alone[0])
        assert_bitwise(mapped[1], alone[1])
    values = jax.vmap(dequantize)(ScaledArray(*mapped))
    assert_bitwise(values, [dequantize(ScaledArray(*q)) for q in zip(*mapped)])


@pytest.mark.slow
@granularities
def test_eager_agrees_with_jit(granularity):
    x = sample()
    eager, jitted = quantize(x, granularity=granularity), jit_quantize(x, granularity=granularity)
    assert_bitwise(eager.data, jitted.data)
    assert_bitwise(eager.scale, jitted.scale)
    assert_bitwise(eager.dequantize(), jitted.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), Block((1, 16))], ids=str)
def test_sharding_changes_nothing(granularity, mesh_of):
    """The amax is that of the whole array, and only amaxes travel."""
    mesh = mesh_of((8,), ("x",))
    x = sample(shape=(16, 64))
    sharding = NamedSharding(mesh, P("x"))
    sharded = jax.device_put(x, sharding)
    q, expected = (
        jit_quantize(sharded, granularity=granularity),
        quantize(x, granularity=granularity),
    )
    assert_bitwise(q.data, expected.data)
    assert_bitwise(q.scale, expected.scale)
    assert_bitwise(dequantize(q), dequantize(expected))
    assert q.data.sharding.is_equivalent_to(sharding, 2)
    program = jit_quantize.lower(sharded, granularity=granularity).compile().as_text()
    assert "all-gather" not in program
    assert ("all-reduce" in program) == (not isinstance(granularity, Block))


@dtypes
def test_gradient_has_the_dtype_of_the_input(dtype):
    x = sample(dtype, (8,))
    gradient = jax.jit(jax.grad(lambda x: dequantize(quantize(x)).sum()))(x)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [1] * 8


@pytest.mark.parametrize("scale", [None, 0.5])
def test_gradient_passes_where_the_value_does_not(scale):
    @jax.jit
    @jax.grad
    def gradient(x):
        return dequantize(quantize(x, scale=scale))[::2].sum()

    for bad in (np.nan, np.inf, 1e30):
        assert gradient(np.array([1.0, 2.0, bad, -2.0], np.float32)).tolist() == [1, 0, 1, 0]


def test_scales_have_no_gradient():
    """Neither a given one, through the values or by itself, nor the one that follows from x."""
    x, scale = np.array([1.0, -2.0], np.float32), np.float32(0.5)

    def both(x, scale):
        q = quantize(x, scale=scale)
        return dequantize(q).sum() + q.scale + quantize(x).scale

    d_x, d_scale = jax.jit(jax.grad(both, argnums=(0, 1)))(x, scale)
    assert d_x.tolist() == [1, 1]
    assert float(d_scale) == 0


X = sample(shape=(4, 16))


@functools.partial(jax.jit, static_argnames=("quantizer", "contracting"))
def call(quantizer, x, contracting=(1,)):
    return quantizer(x, Context(contracting, amax(x)))


def test_rowwise_has_a_scale_for_whatever_is_not_summed_over():
    x = sample(shape=(3, 8, 5, 16))
    for contracting, kept in (((1,), (0, 2, 3)), ((1, 3), (0, 2)), ((0, 1, 2, 3), ())):
        for scale_rounding in (None, "power_of_two"):
            q = call(Rowwise(E4M3FN, scale_rounding), x, contracting=contracting)
            expected = jit_quantize(
                x, E4M3FN, granularity=PerAxis(kept), scale_rounding=scale_rounding
            )
            assert_bitwise(q.scale, expected.scale)
            assert_bitwise(q.data, expected.data)
    assert_quantized(call(Rowwise(E4M3FN), x[0, 0]), x[0, 0], E4M3FN, PerAxis(0))


@pytest.mark.parametrize(
    ("size", "scale_rounding"),
    [((32, 1), "rceil"), ((128, 1), None), ((16, 16), "power_of_two"), ((4, 2), None)],
    ids=str,
)
def test_blockwise_turns_its_blocks_along_the_contraction(size, scale_rounding):
    """``(along the contraction, along the other one)``, of the last two dimensions."""
    along, free = size
    for shape, contracting, block in (
        ((40, 72), (1,), (free, along)),
        ((40, 72), (0,), (along, free)),
        ((2, 40, 72), (2,), (1, free, along)),
        ((2, 40, 72), (1,), (1, along, free)),
    ):
        x = sample(shape=shape)
        options = {"granularity": Block(block), "scale_rounding": scale_rounding}
        q = call(Blockwise(E4M3FN, size, scale_rounding), x, contracting=contracting)
        expected = jit_quantize(x, E4M3FN, **options)
        assert q.block == expected.block
        assert_bitwise(
            *(np.asarray(scale).astype(np.float32) for scale in (q.scale, expected.scale))
        )
        assert_bitwise(q.data, expected.data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        ((1, 32), (3, 40)),
        ((1, 32), (3, 0)),
        ((32, 1), (40, 3)),
        ((128, 128), (5, 300)),
        ((128, 128), (1, 1)),
        ((1, 128), (2, 127)),
        ((16, 16), (17, 33)),
        ((1, 16), (4, 0)),
    ],
    ids=str,
)
def test_a_block_cut_short_is_a_block_with_zeros(block, shape):
    """The array padded with zeros to whole blocks gives the same data, scales and values."""
    x = sample(shape=shape)
    scale_rounding = "rceil" if 32 in block else None
    options = {"granularity": Block(block), "scale_rounding": scale_rounding}
    (q, values), (whole, whole_values) = (
        there_and_back(a, E4M3FN, **options) for a in (x, padded(x, block))
    )
    cut = tuple(map(slice, shape))
    assert q.block == (block if any(n % b for n, b in zip(shape, block)) else None)
    assert whole.block is None
    assert q.scale.shape == tuple(math.ceil(n / b) for n, b in zip(shape, block))
    scales = [np.asarray(a.scale).astype(np.float32) for a in (q, whole)]
    assert_bitwise(*scales)
    assert_bitwise(q.data, whole.data[cut])
    assert_bitwise(values, whole_values[cut])
    assert np.all(np.asarray(values)[x != 0] != 0) or x.size > 10


def nvfp4(x, block):
    """Data, block scales and the tensor's scale, in numpy's f32, operation by operation.

    ``S = 448 * 6 / amax``, ``s = e4m3(amax_block / 6 * S)``, ``q = e2m1(x / (s / S))``.
    """
    f32 = np.float32
    largest_of_blocks = block_amax(x, Block(block))
    largest = np.max(largest_of_blocks, initial=0, where=np.isfinite(largest_of_blocks))
    tensor = f32(448 * 6) / largest if largest > 0 else f32(1)
    with np.errstate(all="ignore"):
        narrow = np.minimum(largest_of_blocks / f32(6) * tensor, f32(448)).astype(E4M3FN.dtype)
        narrow[~np.isfinite(largest_of_blocks)] = np.nan
        wide = narrow.astype(f32)
        m = np.minimum(f32(1) / (wide / tensor), np.finfo(f32).max)
        scaled = x.astype(f32) * spread(m, x.shape, block)
        return np.clip(scaled, -6, 6).astype(E2M1FN.dtype), narrow, tensor


def test_trap_two_level_data_is_divided_by_the_rounded_scale():
    """By the scale before its rounding the largest elements would leave the range of E2M1."""
    x = sample(shape=(4, 1024))
    data, narrow, tensor = nvfp4(x, (1, 16))
    largest = block_amax(x, Block((1, 16)))
    unrounded = x * spread(np.float32(6) / largest, x.shape, (1, 16))
    naive = np.clip(unrounded, -6, 6).astype(E2M1FN.dtype)
    assert np.mean(codes(naive) != codes(data)) > 0.01
    m = spread(np.float32(1) / (narrow.astype(np.float32) / tensor), x.shape, (1, 16))
    tie = np.float32(1.25) / m
    tie = np.choose(
        np.arange(x.size).reshape(x.shape) % 3, [np.nextafter(tie, t) for t in (0, tie, 9)]
    )
    small = abs(x) < spread(largest, x.shape, (1, 16)) / 2
    x = np.where(small, tie, x).astype(np.float32)
    data, *_ = nvfp4(x, (1, 16))
    np.testing.assert_array_equal(codes(call(TwoLevel(E2M1FN, (16, 1)), x).data), codes(data))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_trap_divisions_of_two_level_scales_are_not_rewritten(how):
    """XLA turns ``a / constant`` and ``1 / (s / S)`` into products, which are off by an ulp."""
    rng = np.random.default_rng(8)
    a = np.exp2(rng.uniform(-8, 0, (4, 1000))).astype(np.float32)
    a[:, 0] = 1.03, 1.17, 1.7, 1.83  # the largest of all, of which much depends
    function = lambda a: two_level_scale(a, E2M1FN, E4M3FN)
    mapped = jax.jit(jax.vmap(function))
    how_called = {"eager": function, "jit": jax.jit(function), "vmap": mapped}[how]
    scale, inverse = how_called(jnp.asarray(a))
    # Mapped, each row is a tensor of its own.
    tensor = np.float32(448 * 6) / np.max(a, axis=1 if how == "vmap" else None, keepdims=True)
    narrow = np.minimum(a / np.float32(6) * tensor, 448).astype(E4M3FN.dtype)
    assert_bitwise(scale.data, narrow)
    assert_bitwise(np.ravel(scale.scale), np.ravel(np.float32(1) / tensor))
    narrow = narrow.astype(np.float32)
    assert np.mean(1 / (narrow / tensor) != tensor / narrow) > 0.1
    assert_bitwise(inverse, np.float32(1) / (narrow / tensor))


def test_quantizers_check_their_fields():
    for cls in (Current, Delayed, Unit, Rowwise, Blockwise, TwoLevel):
        with pytest.raises(TypeError, match=r"fmt must be a jfp8\.Format, one of jfp8\.E4M3FN"):
            cls(8)
        assert cls("e4m3") == cls(jnp.float8_e4m3fn) == cls(E4M3FN)
        with pytest.raises(ValueError, match="rounding='up' is unknown.*nearest_even, toward_zero"):
            cls(E4M3FN, rounding="up")
    for cls in (Current, Delayed, Rowwise, Blockwise):
        with pytest.raises(ValueError, match=r"scale_rounding=.* is unknown.*'power_of_two'"):
            cls(E4M3FN, scale_rounding=[])
    for cls in (Unit, Delayed):
        with pytest.raises(ValueError, match=rf"{cls.__name__}\(E2M1FN\).*no NaN.*would vanish"):
            cls(E2M1FN)
    with pytest.raises(NotImplementedError, match="Quantizer does not override __call__"):
        call(Quantizer(E4M3FN), X)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algo": "mean"}, "algo='mean'.*'max', 'most_recent'"),
        ({"margin": -1}, "margin=-1.*at least 0"),
        ({"length": 0}, "length=0.*at least 1"),
    ],
)
def test_delayed_checks_its_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        Delayed(E4M3FN, **fields)


@pytest.mark.parametrize("cls", [Blockwise, TwoLevel])
@pytest.mark.parametrize("size", [32, (32, 0), (32, 1, 1), [32, 1], (32, True)])
def test_block_sizes_are_checked(cls, size):
    with pytest.raises(ValueError, match=r"two positive ints.*like \(32, 1\) or \(128, 128\)"):
        cls(E4M3FN, size)


@pytest.mark.parametrize("wrong", [E8M0FNU, E2M1FN, "e2m1"], ids=str)
def test_scale_formats_are_checked(wrong):
    """E8M0FNU would overflow the tensor's scale; E2M1FN has no NaN for a block that holds one."""
    with pytest.raises(ValueError, match=r"scale_fmt=.*a sign and a NaN.*E4M3FN"):
        TwoLevel(E2M1FN, scale_fmt=wrong)


def test_errors_name_the_dtype():
    for x, dtype in ((np.arange(3), "int32"), (True, "bool")):
        with pytest.raises(TypeError, match=rf"dtype {dtype}.*floating"):
            quantize(x)
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64.*rounded twice"):
        quantize(jnp.ones(3, jnp.float64))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fmt": E8M0FNU}, TypeError, "E8M0FNU has no sign and no zero: it holds scales"),
        ({"fmt": "e4m4"}, ValueError, r"fmt='e4m4': there is no such format.*jfp8\.E4M3FN"),
        ({"rounding": "up"}, ValueError, "'up' is unknown.*nearest_even, toward_zero"),
        ({"rounding": "stochastic"}, ValueError, r"key is None.*jax\.random\.key"),
        ({"scale_rounding": "up"}, ValueError, "'up' is unknown.*'power_of_two', 'rceil'"),
        ({"scale": 2.0, "scale_rounding": "floor"}, ValueError, "scale= was given.*one of the two"),
        ({"scale": np.int32(2)}, TypeError, "scale must be floating, got dtype int32"),
        ({"scale": np.ones(3, np.float32)}, ValueError, r"shape \(4, 6\).*scale of shape \(3,\)"),
        ({"granularity": "row"}, TypeError, r"PerTensor\(\), PerAxis\(axis\) or Block.*'row'"),
        ({"granularity": PerAxis(2)}, ValueError, r"PerAxis\(axis=2\).*\(4, 6\).*-2 to 1"),
        ({"granularity": Block((1, 1, 4))}, ValueError, r"Block\(shape=\(1, 1, 4\)\).*only 2"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        quantize(np.ones((4, 6), np.float32), **options)
