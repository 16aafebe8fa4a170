"""FP8 means, sums and gathers over devices, against numpy, ml_dtypes and `jax.lax`."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import collectives
from jfp8.collectives.wire import _values
from jfp8.scaling.sink import decode_amax, encode_amax
from support.arrays import decibels
from support.compiled import collective_bytes

N = 8
MESH = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
MESH_2D = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
# The oracle rounds to one format; the default is two, each of which is compared with it below.
in_e4m3 = functools.partial(functools.partial, fmt=jfp8.E4M3FN)
pmean = in_e4m3(collectives.pmean, axis_name="d", min_size=0)
reduce_scatter, all_gather = in_e4m3(collectives.reduce_scatter), in_e4m3(collectives.all_gather)
both_modes = pytest.mark.parametrize("check_vma", [True, False])


def on_devices(f, *, mesh: Mesh = MESH, check_vma: bool = False, out_specs=None):
    """`f` of every device's own row; by default all devices' results, stacked."""
    stacked = out_specs is None

    def one(x):
        y = f(jax.tree.map(lambda x: x[0], x))
        return jax.tree.map(lambda y: y[None], y) if stacked else y

    axes = tuple(mesh.axis_names)
    out_specs = P(axes) if stacked else out_specs
    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=P(axes), out_specs=out_specs, check_vma=check_vma)
    )


def to_e2m5(x):
    """Steps of 2^-5 below 2, of 2^-4 below 4, of 2^-3 up to 7.75, ties to even."""
    step = np.where(np.abs(x) < 2, 2**-5, np.where(np.abs(x) < 4, 2**-4, 2**-3))
    return (np.round(x / step) * step).astype(np.float32)


def rounded(x, dtype=ml_dtypes.float8_e4m3fn, block=128):
    """f32[..., k] through one FP8 rounding in blocks along the last axis, in numpy."""
    largest = np.float32(7.75 if dtype == "e2m5" else ml_dtypes.finfo(dtype).max)
    size = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % block)])
    blocks = padded.reshape(*x.shape[:-1], -1, block).astype(np.float32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = np.where(amax == 0, np.float32(1), amax / largest)
    codes = np.clip(blocks * (np.float32(1) / scale), -largest, largest)
    codes = to_e2m5(codes) if dtype == "e2m5" else codes.astype(dtype)
    values = codes.astype(np.float32) * scale
    return values.reshape(*x.shape[:-1], -1)[..., :size]


def integers(size: int, seed: int = 0, n: int = N, largest: int = 448) -> np.ndarray:
    """Integers times a power of two for each block of 128, different for every device."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-largest, largest + 1, (n, -(-size // 128), 128))
    x[..., 0] = largest
    x = x * 2.0 ** rng.integers(-12, 12, x.shape[1])[:, None]
    return x.reshape(n, -1)[:, :size].astype(np.float32)


def gaussian(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, size)).astype(np.float32)


@pytest.mark.representative(2)
@both_modes
@pytest.mark.parametrize(
    ("fmt", "dtype", "largest"),
    [
        (jfp8.E4M3FN, ml_dtypes.float8_e4m3fn, 448),
        (jfp8.E5M2, ml_dtypes.float8_e5m2, 57344 // 64),
        (collectives.E2M5, "e2m5", 496),  # 64 steps for each unit of 7.75
    ],
)
def test_the_mean_is_rounded_twice_and_summed_in_f32(fmt, dtype, largest, check_vma):
    x = integers(5000, largest=largest)
    once = rounded(x, dtype)
    assert (once != x).any()
    expected = rounded(once.sum(0) / np.float32(N), dtype)
    out_specs = P() if check_vma else None
    mean = on_devices(functools.partial(pmean, fmt=fmt), check_vma=check_vma, out_specs=out_specs)
    result = np.asarray(mean(x))
    np.testing.assert_array_equal(result, expected if check_vma else np.tile(expected, (N, 1)))


@pytest.mark.slow
def test_every_size_is_padded_and_cut_right():
    sizes = (34, 127, 128, 129, 1023, 1024, 1025, 8 * 128 * 3 + 5)
    tree = {size: integers(size, seed=size) for size in sizes}
    tree[0] = np.zeros((N, 8192), np.float32)
    result = on_devices(pmean)(tree)
    for size, x in tree.items():
        expected = rounded(rounded(x).sum(0) / np.float32(N))
        np.testing.assert_array_equal(result[size], np.tile(expected, (N, 1)))


def test_trap_a_sink_is_not_rounded():
    """10,000 uses with an amax around 1 on each device, and one of 1.9 on one, which was lost."""
    rows = np.asarray(jax.jit(encode_amax)(np.float32([1.03, 1.2, 1.4, 1.6, 1.9])))
    sinks = np.tile(np.float32([9500, 4700, 2300, 777, 0]) @ rows, (N, 3, 1))
    sinks[3] += rows[-1]
    mean = on_devices(functools.partial(collectives.pmean, axis_name="d"))
    found, overflow = jax.jit(decode_amax)(mean(sinks))
    assert np.all((found >= np.float32(1.9)) & (found <= 9 / 8 * np.float32(1.9)))
    assert not overflow.any()


@pytest.mark.slow
def test_all_devices_get_the_same_bits():
    x = gaussian(20000)
    for options in ({}, {"rounding": "stochastic", "key": jax.random.key(0)}):
        result = np.asarray(on_devices(functools.partial(pmean, **options))(x))
        assert (result == result[:1]).all()
        assert np.abs(result).max() > 1


def normal_in_blocks(rng):
    """Each block normal, over many orders of magnitude from block to block, as between layers."""
    magnitude = 1e-30 * (10 ** rng.uniform(-4, 0, 512)).repeat(128)
    return rng.normal(size=(N, 65536)) * magnitude


def heavy_tails(rng):
    shared = rng.standard_t(2, size=65536)
    return shared * (1 + 0.5 * rng.normal(size=(N, 65536)))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [normal_in_blocks, heavy_tails])
def test_the_finest_formats_keep_40_decibels(gradients):
    """Wherever the energy is; and neither of the two does it alone."""
    x = gradients(np.random.default_rng(0)).astype(np.float32)
    exact = x.astype(np.float64).mean(0)

    def all_three(x):
        default = collectives.pmean(x, "d")
        return [default, *(pmean(x, fmt=fmt) for fmt in collectives.FINEST)]

    both, wide, fine = (decibels(exact, y[0]) for y in on_devices(all_three)(x))
    assert both >= 40
    assert both > wide + 5
    assert both > fine - 0.1
    assert gradients is not heavy_tails or fine < 40


def test_every_code_of_e2m5():
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = np.asarray(_values(codes, collectives.E2M5))
    grid = [(32 * (e > 0) + m) * 2.0 ** max(e - 1, 0) / 32 for e in range(4) for m in range(32)]
    grid[-1] = np.nan
    np.testing.assert_array_equal(values, [*grid, *(-x for x in grid)])
    assert np.signbit(values[128])
    assert np.nanmax(values) == collectives.E2M5.max == 7.75
    assert collectives.E2M5.nan_code == collectives.E2M5.max_code + 1 == 127


@pytest.mark.slow
def test_bytes_are_a_quarter_of_f32_in_one_exchange_and_one_gather():
    x = {"w": jnp.zeros((N, 512, 384)), "b": jnp.zeros((N, 384))}
    sent = lambda mean: collective_bytes(on_devices(mean).lower(x).compile())
    records = 512 * 384 // 128 + 3
    records += -records % N
    for fmt in (jfp8.E4M3FN, collectives.FINEST):  # two formats are as many bytes as one
        found = sent(functools.partial(pmean, fmt=fmt))
        assert [c.op for c in found.collectives] == ["all-to-all", "all-gather"]
        assert found.by_dtype() == {"u8": 2 * 7 / 8 * records * 132}
    exact = sent(lambda x: lax.pmean(x, "d"))
    assert exact.total == 2 * 7 / 8 * (512 * 384 + 384) * 4
    assert found.total <= 0.27 * exact.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "fmt", "check_vma"),
    [
        (np.inf, jfp8.E4M3FN, True),
        (np.nan, jfp8.E4M3FN, False),
        (-np.inf, collectives.FINEST, False),
        (np.nan, collectives.FINEST, True),
    ],
)
def test_trap_what_is_not_finite_on_one_device_reaches_all(bad, fmt, check_vma):
    x = gaussian(20000)
    mean = functools.partial(pmean, fmt=fmt)
    clean = np.asarray(on_devices(mean)(x))[0]
    x[3, 1000] = bad
    mean = on_devices(mean, check_vma=check_vma, out_specs=P() if check_vma else None)
    result = np.asarray(mean(x)).reshape(-1, 20000)
    assert not np.isfinite(result[:, 1000]).any()
    elsewhere = np.delete(np.arange(20000), np.s_[1000 // 128 * 128 : 1000 // 128 * 128 + 128])
    np.testing.assert_array_equal(result[:, elsewhere], np.tile(clean[elsewhere], (len(result), 1)))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [jfp8.E4M3FN, collectives.FINEST])
def test_stochastic_rounding_is_unbiased_over_draws(fmt):
    x = gaussian(2048)
    mean = functools.partial(pmean, rounding="stochastic", fmt=fmt)
    draw = lambda x: lax.map(lambda seed: mean(x, key=jax.random.key(seed)), jnp.arange(400))
    draws = np.asarray(on_devices(draw)(x), np.float64)[0]
    exact = x.astype(np.float64).mean(0)
    error = draws - exact
    spread = error.std(0)
    assert (spread > 0).mean() > 0.98  # all but the largest of some blocks
    # The mean of 400 draws is off by a twentieth of the spread of one; five times that is too rare
    # to be seen among 2048 elements. To nearest, the error would be the same in every draw.
    moving = spread > 0
    assert np.abs(error.mean(0)[moving] / spread[moving]).max() < 5 / 20
    nearest = np.asarray(on_devices(functools.partial(pmean, fmt=fmt))(x), np.float64)[0] - exact
    assert np.abs(nearest[moving] / spread[moving]).max() > 5 / 20


def test_stochastic_rounding_draws_other_bits_on_every_device():
    """The same gradient everywhere: with the same bits, errors would not average out."""
    x = np.tile(gaussian(16384)[:1], (N, 1))
    scatter = functools.partial(
        reduce_scatter, axis_name="d", mean=True, min_size=0, rounding="stochastic"
    )
    draw = on_devices(lambda x: scatter(x, key=jax.random.key(0)))
    error = np.asarray(draw(x)).reshape(-1) - x[0]
    alone = np.asarray(jfp8.quantize(
        x[0], granularity=jfp8.Block((128,)), rounding="stochastic", key=jax.random.key(0)
    ).dequantize()) - x[0]  # fmt: skip
    assert 0.9 < error.std() / (alone.std() / np.sqrt(N)) < 1.1


def test_the_second_rounding_of_a_mean_draws_other_bits_than_the_first():
    """The same bits for a quarter of a step of 32 would raise its mean by a thirty-second of it."""
    x = np.full((2, 2**15), 264, np.float32)
    x[:, ::128] = 448
    mean = functools.partial(pmean, rounding="stochastic", key=jax.random.key(0))
    error = np.asarray(jax.vmap(mean, axis_name="d")(x))[0] - x[0]
    assert error.std() > 8
    assert abs(error.mean()) < 0.5


@pytest.mark.slow
def test_small_trees_are_averaged_in_f32():
    x = {"w": gaussian(100), "b": gaussian(3995, 1)}
    for tree, exact in ((x, True), ({**x, "more": gaussian(1, 2), "v": gaussian(34, 3)}, False)):
        mean = on_devices(lambda x: collectives.pmean(x, "d"))
        found = collective_bytes(mean.lower(tree).compile())
        assert {c.op for c in found.collectives if c.bytes > 100} == (
            {"all-reduce"} if exact else {"all-to-all", "all-gather"}
        )
        result = mean(tree)
        for name, leaf in tree.items():
            near = decibels(leaf.astype(np.float64).mean(0), result[name][0])
            assert near > 120 if exact or name == "more" else 25 < near < 60


@pytest.mark.slow
def test_leaves_too_small_for_a_block_travel_in_f32():
    """A bias of 8 elements would be 132 bytes as a block, and 32 as it is."""
    small = {f"b{i}": gaussian(8, i) for i in range(40)}
    mean = on_devices(pmean)
    found = collective_bytes(mean.lower(small).compile())
    assert found.by_dtype() == {"f32": 2 * 7 / 8 * 40 * 8 * 4}
    result = mean({**small, "w": gaussian(8192)})
    for name, leaf in small.items():
        np.testing.assert_allclose(result[name][0], leaf.mean(0), rtol=1e-6, atol=1e-7)
    # Few blocks among many devices would be padded to more than they hold.
    found = collective_bytes(mean.lower({"w": jnp.zeros((N, 130))}).compile())
    assert found.total <= 2 * 7 / 8 * 130 * 4


@pytest.mark.slow
@both_modes
def test_several_axes(check_vma):
    x = integers(6000)
    expected = rounded(rounded(x).sum(0) / np.float32(N))
    mean = in_e4m3(collectives.pmean, axis_name=("a", "b"), min_size=0)
    out_specs = P() if check_vma else None
    result = on_devices(mean, mesh=MESH_2D, check_vma=check_vma, out_specs=out_specs)(x)
    np.testing.assert_array_equal(np.asarray(result).reshape(-1, 6000)[-1], expected)
    # Over one axis of two: each half of the devices by itself.
    one_axis = in_e4m3(collectives.pmean, axis_name="a", min_size=0)
    halves = x.reshape(4, 2, 6000)
    expected = rounded(rounded(halves).sum(0) / np.float32(4))
    result = on_devices(one_axis, mesh=MESH_2D, check_vma=check_vma)(x)
    np.testing.assert_array_equal(
        np.asarray(result).reshape(4, 2, 6000), np.tile(expected, (4, 1, 1))
    )


@both_modes
def test_one_device_gets_its_own(check_vma):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    x = gaussian(20000)[:1]
    result = on_devices(pmean, mesh=mesh, check_vma=check_vma, out_specs=P())(x)
    np.testing.assert_array_equal(result, x[0])


@pytest.mark.representative(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_gradients_keep_their_dtype_and_sum_in_f32(dtype):
    x = (gaussian(20000) + 2.0).astype(dtype) * jnp.asarray(8000, dtype)  # sums exceed float16
    tree = {"w": x, "small": x[:, :5]}
    result = on_devices(pmean)(tree)
    for name, leaf in tree.items():
        assert result[name].dtype == dtype
        assert decibels(np.asarray(leaf, np.float64).mean(0), result[name][0]) > 28


@pytest.mark.slow
@both_modes
def test_integers_and_empty_leaves_are_not_rounded(check_vma):
    """JAX 0.11.2 crashes while it compiles an all-reduce of nothing."""
    count = np.arange(N * 300).reshape(N, 300)
    tree = {"w": integers(8192), "none": np.zeros((N, 0, 4), np.float32), "less": {}}
    on_all = functools.partial(on_devices, check_vma=check_vma, out_specs=P())
    result = on_all(pmean)(tree | {"count": count})
    assert result["none"].shape == (0, 4)
    assert result["w"].any()
    assert result["less"] == {}
    expected = on_all(lambda x: lax.pmean(x, "d"))(count)
    assert result["count"].dtype == expected.dtype
    np.testing.assert_array_equal(result["count"], expected)
    assert jax.vmap(lambda x: {"x": x, **pmean({})}, axis_name="d")(jnp.ones(N))["x"].sum() == N


def test_what_does_not_vary_is_its_own_mean():
    """Nothing is sent for it, and it is not rounded."""
    w = gaussian(8192)[0]
    same = jax.shard_map(pmean, mesh=MESH, in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(jax.jit(same)(w), w)
    assert collective_bytes(jax.jit(same).lower(w).compile()).collectives == ()


@pytest.mark.slow
def test_leaves_that_vary_over_different_axes():
    """The mean of what is shared along another axis is shared along it, too."""
    x = integers(8192, n=4)
    y = integers(8192, n=8, seed=1)

    def mean(x, y):
        return in_e4m3(collectives.pmean)((x[0], y[0]), "a", min_size=0)

    specs = (P("a"), P(("a", "b")))
    f = jax.shard_map(mean, mesh=MESH_2D, in_specs=specs, out_specs=(P(), P("b")))
    result = jax.jit(f)(x, y)
    np.testing.assert_array_equal(result[0], rounded(rounded(x).sum(0) / np.float32(4)))
    halves = rounded(rounded(y.reshape(4, 2, 8192)).sum(0) / np.float32(4))
    np.testing.assert_array_equal(result[1], halves.reshape(-1))


@both_modes
def test_derivatives_are_those_of_lax(check_vma):
    x, weights = jnp.asarray(gaussian(2 * 4096)), jnp.asarray(gaussian(2 * 4096, 1)[0])
    options = {"min_size": 0}

    def ours(x):
        mean = collectives.pmean(x, "d", **options)
        part = reduce_scatter(x * x, "d", **options)
        whole = all_gather(part, "d", tiled=True, **options)
        return mean, whole

    def theirs(x):
        part = lax.psum_scatter(x * x, "d", tiled=True)
        return lax.pmean(x, "d"), lax.all_gather(part, "d", tiled=True)

    def gradient(f):
        def loss(x):
            mean, whole = f(x)
            return lax.pmean(jnp.sum(mean * weights) + jnp.sum(whole * weights), "d")

        return on_devices(jax.grad(loss), check_vma=check_vma)(x)

    expected = gradient(theirs)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(gradient(ours), expected, rtol=1e-6, atol=1e-6)
    # Cotangents travel in their own dtype.
    whole = lambda x: jnp.sum(all_gather(x, "d", tiled=True, min_size=0) ** 2)
    found = collective_bytes(on_devices(jax.grad(whole)).lower(x).compile())
    assert {(c.op, c.dtype) for c in found.collectives} == {
        ("all-gather", "u8"),
        ("reduce-scatter", "f32"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dimension", "mean", "check_vma"),
    [
        ((16, 96), 0, True, False),
        ((16, 96), 0, False, True),
        ((12, 64), 1, False, False),
        ((5, 32, 7), -2, True, True),
    ],
)
def test_reduce_scatter(shape, dimension, mean, check_vma):
    x = np.random.default_rng(0).integers(-400, 401, (N, *shape)).astype(np.float32)
    # parts[i, j] goes from device i to device j, and is quantized by itself.
    parts = np.stack(np.split(x, N, dimension % len(shape) + 1), 1)
    flat = parts.reshape(N, N, -1)
    flat[..., ::128] = 448  # the scales of all blocks are one
    x = np.concatenate(np.moveaxis(parts, 1, 0), dimension % len(shape) + 1)
    divisor = np.float32(N if mean else 1)

    scatter = functools.partial(
        reduce_scatter, axis_name="d", scatter_dimension=dimension, mean=mean
    )
    result = on_devices(functools.partial(scatter, min_size=0), check_vma=check_vma)(x)
    np.testing.assert_array_equal(result, rounded(flat).sum(0).reshape(parts.shape[1:]) / divisor)
    exact = on_devices(scatter)(x)  # small, and so in f32
    np.testing.assert_array_equal(exact, parts.sum(0) / divisor)
    assert (np.asarray(exact) != np.asarray(result)).any()


def test_two_devices_round_what_they_send():
    """A row each, which is no whole number of blocks."""
    x = np.random.default_rng(0).normal(size=(2, 2, 500)).astype(np.float32)
    scatter = functools.partial(reduce_scatter, axis_name="d", min_size=0)
    found = jax.vmap(scatter, axis_name="d")(x)
    np.testing.assert_array_equal(found[:, 0], rounded(x).sum(0))


def test_reduce_scatter_keeps_the_dtype_and_sums_16_bits_in_f32():
    x = jnp.full((N, 8192), 60000, jnp.float16)
    mean = functools.partial(reduce_scatter, axis_name="d", mean=True)
    for min_size in (0, 10**6):
        result = on_devices(functools.partial(mean, min_size=min_size))(x)
        assert result.dtype == jnp.float16
        np.testing.assert_array_equal(result, np.full((N, 1024), 60000, np.float16))


@pytest.mark.representative(2)
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("axis", [1, 0, -1])
def test_all_gather(axis, tiled):
    x = np.random.default_rng(0).normal(size=(N, 3, 100)).astype(np.float32)
    once = rounded(x.reshape(N, -1)).reshape(x.shape)
    place = np.concatenate if tiled else np.stack
    expected = place(once, axis if axis >= 0 else axis % (2 if tiled else 3))
    gather = functools.partial(all_gather, axis_name="d", axis=axis, tiled=tiled, min_size=0)
    result = on_devices(gather)(x)
    np.testing.assert_array_equal(result, np.tile(expected, (N, *[1] * expected.ndim)))
    shared = functools.partial(gather, to="invarying")
    np.testing.assert_array_equal(jax.vmap(shared, axis_name="d")(x)[3], expected)
    for check_vma in (True, False):
        result = on_devices(shared, check_vma=check_vma, out_specs=P())(x)
        np.testing.assert_array_equal(result, expected)


def test_all_gather_sends_bytes_and_keeps_the_dtype():
    x = jnp.asarray(gaussian(16384), jnp.bfloat16)
    gather = on_devices(lambda x: all_gather(x, "d"))
    assert gather(x).dtype == jnp.bfloat16
    found = collective_bytes(gather.lower(x).compile())
    assert found.by_dtype() == {"u8": 7 / 8 * N * 128 * 132}
    whole = on_devices(lambda x: all_gather(x, "d"))(np.arange(N * 4).reshape(N, 4))
    np.testing.assert_array_equal(whole[3], np.arange(N * 4).reshape(N, 4))


@pytest.mark.slow
def test_explicit_axes():
    mesh = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Explicit,))
    x = integers(6000)
    expected = rounded(rounded(x).sum(0) / np.float32(N))
    mean = jax.shard_map(lambda x: pmean(x[0]), mesh=mesh, in_specs=P("d"), out_specs=P())
    with jax.set_mesh(mesh):
        result = jax.jit(mean)(jax.device_put(x, jax.NamedSharding(mesh, P("d"))))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: pmean(x, fmt=jfp8.E2M1FN), TypeError, "E4M3FN, E5M2, .*got Format\\(E2M1FN\\)"),
        (lambda x: pmean(x, fmt=()), TypeError, "or two of them; got \\(\\)"),
        (lambda x: pmean(x, fmt=jfp8.E8M0FNU), TypeError, "with a sign.*E8M0FNU"),
        (lambda x: pmean(x, fmt="e4m4"), ValueError, "fmt='e4m4': there is no such format.*E2M5"),
        (lambda x: pmean(x, block=0), ValueError, "block=0 must be a positive int"),
        (lambda x: pmean(x, rounding="up"), ValueError, "rounding='up' is unknown. Allowed: near"),
        (lambda x: pmean(x, rounding="stochastic"), ValueError, "Pass key=jax.random.key"),
        (
            lambda x: reduce_scatter(x[:9], "d"),
            ValueError,
            r"shape \(9,\), and 8 does not divide 9",
        ),
        (
            lambda x: reduce_scatter(x, "d", scatter_dimension=1),
            ValueError,
            "scatter_dimension=1 does not exist.*-1 to 0",
        ),
        (lambda x: all_gather(x, "d", axis=2), ValueError, "axis=2 does not exist"),
        (lambda x: all_gather(x, "d", to="all"), ValueError, "'varying', 'invarying'"),
    ],
)
def test_errors_teach(call, error, words):
    with pytest.raises(error, match=words):
        on_devices(call)(gaussian(64))
