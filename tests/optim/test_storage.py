"""Stored moments, against the rules of MS-AMP, torchao and COAT in numpy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import E4M3FN, E5M2, E8M0FNU
from jfp8.optim.adam import adam
from jfp8.optim.block_storage import Blocks
from jfp8.optim.storage import Float, ScaledFloat16, Storage
from jfp8.scaling.random_bits import fold_in
from support.arrays import codes
from support.coat import coat

SEED = jnp.asarray([3, 7], jnp.uint32)
FORMATS = (E4M3FN, E5M2)
BLOCKS = [
    Blocks(fmt, block, rounding, transform)
    for fmt in FORMATS
    for block in ((128, None) if fmt is E4M3FN else (128,))
    for rounding in ("nearest_even", "stochastic")
    for transform in (None, "expand")
]
STORAGES = [
    Float(),
    Float(jnp.bfloat16),
    Float(jnp.float16),
    Float(jnp.bfloat16, stochastic=True),
    ScaledFloat16(),
    *BLOCKS,
]


def moments(shape=(6, 300), seed=0, size=1e-4) -> np.ndarray:
    """Heavy-tailed, with zeros, of a size that differs from row to row; the last block is cut."""
    rng = np.random.default_rng(seed)
    x = size * rng.normal(size=shape) ** 3 * 10.0 ** rng.uniform(-2, 2, (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.02, 0, x).astype(np.float32)


def round_trips(storage: Storage, xs) -> np.ndarray:
    both = jax.jit(jax.vmap(lambda x: storage.decode(storage.encode(x, SEED))))
    return np.asarray(both(jnp.asarray(xs, jnp.float32)))


def encode(storage: Storage, x, seed=SEED):
    return jax.jit(storage.encode)(jnp.asarray(x, jnp.float32), seed)


def round_trip(storage: Storage, x, seed=SEED) -> np.ndarray:
    return np.asarray(jax.jit(storage.decode)(encode(storage, x, seed)))


def blocks_of(x: np.ndarray, block: int | None):
    """(where, elements) of each block along the last axis."""
    if block is None:
        yield (), x
        return
    for row in np.ndindex(x.shape[:-1]):
        for b, start in enumerate(range(0, x.shape[-1], block)):
            yield (*row, b), x[row][start : start + block]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("square", [False, True], ids=["m", "v"])
def test_coat_expansion_in_float64(fmt, square):
    x = moments()
    x[0] = 0.75  # max = min, which would make k infinite
    x[1] = np.ldexp(np.float32(1), -(np.arange(300) % 60))  # more than can be spanned
    x = x**2 if square else x
    storage = Blocks(fmt, transform="expand")
    kept, decoded = encode(storage, x), round_trip(storage, x)
    data, powers = np.asarray(kept.data), np.asarray(kept.power, np.float64)
    differ = total = 0
    for where, part in blocks_of(x, 128):
        q, values, k = coat(part, fmt)
        assert powers[where] == k
        here = (*where[:-1], slice(128 * where[-1], 128 * where[-1] + len(part)))
        ours = np.abs(data[here].astype(np.float64))
        differ += (ours != q.astype(np.float64)).sum()
        total += len(part)
        same = ours == q.astype(np.float64)
        np.testing.assert_allclose(decoded[here][same], values[same], rtol=2e-5, atol=0)
        # Where they differ, by one step: f32's logarithms decide ties.
        np.testing.assert_allclose(decoded[here], values, rtol=0.5, atol=0)
        assert np.array_equal(decoded[here] == 0, part == 0)
    assert differ <= total * 0.005


def largest_error(storage: Blocks, x: np.ndarray) -> np.ndarray:
    """What rounding in a format of 3 or 2 mantissa bits may change each element by."""
    fmt, whole = storage.fmt, storage.rounding == "stochastic"
    half = 2.0 ** -(fmt.mantissa_bits + (0 if whole else 1))
    subnormal = fmt.smallest_subnormal / fmt.max * (1 if whole else 0.5)
    bound = np.empty_like(x)
    for where, part in blocks_of(x, storage.block):
        here = (*where[:-1], slice(128 * where[-1], 128 * where[-1] + len(part))) if where else ()
        a = np.abs(part)
        if storage.transform is None:
            bound[here] = np.maximum(half * a, subnormal * a.max())
        else:
            # The smallest element is 2.28 of the smallest codes: the next one is 44 % away.
            k = coat(part, fmt)[2]
            bound[here] = a * ((1 - (0.44 if whole else 0.23)) ** (-1 / k) - 1)
    return bound


@pytest.mark.parametrize("storage", BLOCKS, ids=repr)
def test_errors_are_those_of_the_format(storage):
    xs = np.stack([moments(size=size) for size in (1e-20, 1e-4, 1e8)])
    for x, decoded in zip(xs, round_trips(storage, xs), strict=True):
        error = np.abs(decoded.astype(np.float64) - x)
        assert np.all(error <= 1.0001 * largest_error(storage, x))
        assert np.mean(decoded != 0) > 0.6


def test_float16_with_a_scale_is_nearly_exact():
    x = moments() ** 2
    decoded = round_trip(ScaledFloat16(), x)
    bound = 2.0**-11 * x + np.float64(2.0**-25) * x.max() / 2**15
    assert np.all(np.abs(decoded.astype(np.float64) - x) <= bound)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=repr)
def test_zeros_stay_zeros(storage):
    decoded = round_trip(storage, np.zeros((3, 200), np.float32))
    np.testing.assert_array_equal(decoded.view(np.uint32), 0)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=repr)
def test_trap_nonfinite_is_never_read_back_as_finite(storage):
    """Also not in 4096 elements and more, whose float maximum drops NaN on XLA:CPU."""
    where = [((0, 0), np.inf), ((40, 299), np.inf), ((7, 128), -np.inf), ((40, 299), np.nan)]
    xs = np.stack([moments((41, 300))] * len(where))
    for x, (index, bad) in zip(xs, where, strict=True):
        x[index] = bad
    for decoded, (index, _) in zip(round_trips(storage, xs), where, strict=True):
        assert not np.isfinite(decoded[index])
        assert np.isfinite(decoded).any() == (
            getattr(storage, "block", 1) is not None and storage != ScaledFloat16()
        )


@pytest.mark.slow
@pytest.mark.parametrize("storage", BLOCKS, ids=repr)
def test_trap_the_largest_does_not_overflow(storage):
    """A cast to e4m3fn beyond 464 is NaN, to e5m2 beyond 61440 inf; and a scale that rounds down
    would take the largest there."""
    x = np.float32(1.9999999) * np.ldexp(np.float32(1), np.arange(-60, 60))[:, None]
    decoded = jax.vmap(lambda row: storage.decode(storage.encode(row, SEED)))(jnp.asarray(x))
    np.testing.assert_allclose(decoded, x, rtol=0.01)


STOCHASTIC = [s for s in BLOCKS if s.rounding == "stochastic"]


@pytest.mark.parametrize("storage", STOCHASTIC, ids=repr)
def test_stochastic_rounding_is_right_on_average(storage):
    """Also through a root or power, where drawing between codes would decode to too much."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 160)) * 10.0 ** rng.uniform(-3, 0, (4, 160))).astype(np.float32)
    draws = 2000
    seeds = jax.vmap(functools.partial(fold_in, SEED))(jnp.arange(draws, dtype=jnp.uint32))
    kept = jax.jit(jax.vmap(lambda seed: storage.decode(storage.encode(jnp.asarray(x), seed))))
    values = np.asarray(kept(seeds), np.float64)
    low, high = values.min(0), values.max(0)
    assert np.all((values == low) | (values == high))  # two neighbors
    unseen = 3e-3 * np.abs(x)  # a neighbor that is not among the draws is as far away as that
    assert np.all((low - unseen <= x) & (x <= high + unseen))
    # 5 standard deviations of the mean of `draws`; the largest of 640 exceeds 4 in 1 of 25.
    sd = np.sqrt(np.abs((high - x) * (x - low)) / draws)
    assert np.all(np.abs(values.mean(0) - x) <= 5 * sd + unseen)
    # All together are closer still, which a bias of a tenth of a step would not be.
    steps = np.where(high > low, high - low, 1)
    assert abs(np.mean((values.mean(0) - x) / steps)) < 5 * 0.5 / np.sqrt(draws * x.size)


@pytest.mark.parametrize(
    "storage", [Blocks(), Blocks(block=None), Blocks(transform="expand")], ids=str
)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_arrays_without_elements(storage, shape):
    kept = jax.eval_shape(storage.encode, jnp.zeros(shape), SEED)
    assert kept.data.shape == jax.eval_shape(storage.decode, kept).shape == shape


# Second moments in 8 bits without a sign, by the rule in the docstring of `jfp8.optim.levels` ---

NEAREST = Blocks(E8M0FNU, transform="expand")
LOT = Blocks(E8M0FNU, transform="expand", rounding="stochastic")


def decoded(kept) -> np.ndarray:
    return np.array(jax.jit(LOT.decode)(kept))


def levels_of(part: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Of one block ``top``, ``n``, and where its elements but zero lie between codes."""
    a = part[part > 0].astype(np.float64)
    top = 2.0 ** np.ceil(np.log2(a.max()))
    binades = np.clip(np.log2(top) - np.floor(np.log2(a.min())), 1, 48)
    allowed = [n for n in range(1, 129) if n < 8 or n % 2 ** (n.bit_length() - 3) == 0]
    n = max(n for n in allowed if n * binades <= 253)
    with np.errstate(divide="ignore"):
        return top, n, 254 + n * np.log2(part.astype(np.float64) / top)


def test_levels_follow_their_rule():
    x = moments() ** 2
    kept = encode(NEAREST, x)
    values = decoded(kept)
    for row in range(len(x)):
        for i, start in enumerate(range(0, 300, 128)):
            part = x[row, start : start + 128]
            top, n, level = levels_of(part)
            assert (kept.amax[row, i], kept.power[row, i]) == (top, n)
            here = codes(kept.data)[row, start : start + 128]
            exact = np.where(part > 0, np.clip(np.round(level), 1, 254), 0)
            level = np.maximum(level, 0)
            tie = np.abs(level % 1 - 0.5) < 1e-3
            np.testing.assert_array_equal(here[~tie], exact[~tie])
            expected = np.where(here > 0, top * 2.0 ** ((here - 254.0) / n), 0)
            np.testing.assert_allclose(values[row, start : start + 128], expected, rtol=4e-6)


def test_a_level_is_right_on_average():
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-8, 0, (4, 160))).astype(np.float32)
    draws = 2000
    seeds = jax.vmap(functools.partial(fold_in, SEED))(jnp.arange(draws, dtype=jnp.uint32))
    kept = jax.jit(jax.vmap(lambda seed: LOT.encode(jnp.asarray(x), seed)))(seeds)
    drawn, off = codes(kept.data).astype(np.float64), []
    for row, start in ((0, 0), (3, 128)):
        _, _, level = levels_of(x[row, start : start + 128])
        mean = drawn[:, row, start : start + 128].mean(0)
        # 5 standard deviations of a lot between two neighbors, and what f32 makes of a logarithm.
        sd = np.sqrt((level - np.floor(level)) * (np.ceil(level) - level) / draws)
        assert np.all(np.abs(mean - level) <= 5 * sd + 1e-3)
        assert np.all(np.abs(drawn[:, row, start : start + 128] - level) < 1.001)
        off += list(mean - level)
    # Drawn by the distances of values, they would be 0.007 too high.
    assert abs(np.mean(off)) < 5 * 0.5 / np.sqrt(draws * len(off))


def test_levels_stand_still():
    """Stored values are stored again unchanged, even stochastically or if the largest grows."""
    largest = np.arange(256) % 128 == 0
    x = 10.0 ** np.random.default_rng(0).uniform(-4, -0.1, (8, 256))  # 14 binades, then 15
    once = round_trip(LOT, np.where(largest, 1, x))
    for size, top in ((1, 1), (1.9, 2)):
        grown = np.where(largest, size, once)
        kept = encode(LOT, grown, SEED + np.uint32(1))
        assert np.all(np.asarray(kept.amax, np.float32) == top)
        # f32's logarithm of a level is no whole number, but so near that no lot of these differs.
        np.testing.assert_allclose(decoded(kept)[:, ~largest], once[:, ~largest], rtol=1e-6)


@pytest.mark.parametrize("storage", [NEAREST, LOT], ids=["nearest", "stochastic"])
def test_level_zero_is_for_zero_alone(storage):
    x = np.zeros((3, 200), np.float32)
    np.testing.assert_array_equal(round_trip(storage, x).view(np.uint32), 0)
    x[0] = 1.0
    x[1] = np.ldexp(np.float32(1), -(np.arange(200) % 126))
    x[0, 5] = x[1, 5] = 0
    x[2, 0] = np.finfo(np.float32).max
    decoded = round_trip(storage, x)
    np.testing.assert_array_equal(decoded == 0, x == 0)
    np.testing.assert_allclose(decoded[0], x[0], rtol=0)
    assert decoded[1, :128][x[1, :128] > 0].min() > 2.0**-51  # smaller ones grow, and none vanishes
    within = (x[1] > 2.0**-48) & (np.arange(200) < 128)
    np.testing.assert_allclose(np.log2(decoded[1][within]), np.log2(x[1][within]), atol=0.21)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-30], ids=str)
def test_what_has_no_level_shows(bad):
    """A negative number, too: its sign would be lost."""
    x = moments() ** 2
    x[2, 130] = bad
    decoded = round_trip(LOT, x).copy()
    assert np.isnan(decoded[2, 128:256]).all()
    decoded[2, 128:256] = 0
    assert np.isfinite(decoded).all()
    x[2, 130] = -0.0
    assert round_trip(LOT, x)[2, 130] == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Blocks(4), TypeError, "must be a jfp8.Format"),
        (
            lambda: Blocks(E8M0FNU),
            TypeError,
            "with a sign.*never negative.*E8M0FNU, transform='expand'",
        ),
        (lambda: adam(1e-3, mu=NEAREST), ValueError, "mu=.*has no sign, but a first moment has"),
        (lambda: Blocks(block=0), ValueError, "block=0.*number of elements along the last axis"),
        (lambda: Blocks(block=(1, 128)), ValueError, "or None for one scale"),
        (lambda: Blocks(rounding="up"), ValueError, "'up'.*Allowed: 'nearest_even', 'stochastic'"),
        (lambda: Blocks(transform="log"), ValueError, "'log'.*Allowed: None, 'expand'"),
        (lambda: Blocks(scale_rounding="up"), ValueError, "'up'.*Allowed: None, 'power_of_two'"),
        (
            lambda: Blocks(transform="expand", scale_rounding="power_of_two"),
            ValueError,
            "Drop one of the two",
        ),
        (lambda: Float(jnp.int8), TypeError, "For 8 bits use Blocks"),
        (lambda: Float(stochastic=True), ValueError, "choose a 16-bit dtype"),
        (Storage, TypeError, "abstract"),
    ],
)
def test_mistakes_are_told(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_storages_compare_by_value():
    assert Float(jnp.bfloat16) == Float("bfloat16")
    assert len({Blocks(), Blocks(E4M3FN, 128), ScaledFloat16(), ScaledFloat16()}) == 2
