"""Laws of `quantize` and `dequantize`: bounds and symmetries of format and granularity."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, Block, PerAxis, PerTensor, dequantize, quantize
from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.quantizer import Context
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import amax
from support.arrays import codes, f64, values_of

pytestmark = pytest.mark.property

UNIT = 2.0**-24  # unit roundoff of f32
FLUSHED = 2.0**-126  # XLA:CPU takes what is smaller for zero, unless a scale is E8M0
NARROW = (jnp.float16, jnp.bfloat16)
ROUNDINGS = ("nearest_even", "nearest_even", "toward_zero", "stochastic")
E8M0_MODES = ("rceil", "floor", "ceil", "even")
KEY = jax.random.key(0)


@dataclass(frozen=True)
class Case:
    """All that a program is compiled for."""

    shape: tuple[int, ...]
    dtype: type
    fmt: Format
    granularity: PerTensor | PerAxis | Block
    scale_rounding: str | None
    rounding: str

    @property
    def kept(self) -> set[int]:
        """The dimensions of which each index has a scale of its own."""
        if not isinstance(self.granularity, PerAxis):
            return set()
        axes = self.granularity.axis
        return {axis % len(self.shape) for axis in (axes if isinstance(axes, tuple) else (axes,))}

    @property
    def block(self) -> tuple[int, ...]:
        """How many elements share a scale, along each dimension."""
        g = self.granularity
        if isinstance(g, Block):
            return (1,) * (len(self.shape) - len(g.shape)) + g.shape
        return tuple(1 if axis in self.kept else max(n, 1) for axis, n in enumerate(self.shape))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        if isinstance(self.granularity, PerTensor):
            return ()
        if isinstance(self.granularity, Block):
            return tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))
        return tuple(n if axis in self.kept else 1 for axis, n in enumerate(self.shape))

    @property
    def ragged(self) -> bool:
        return any(n % b for n, b in zip(self.shape, self.block, strict=True))

    @property
    def e8m0(self) -> bool:
        return self.scale_rounding in E8M0_MODES

    @property
    def powers_of_two(self) -> bool:
        return self.e8m0 or self.scale_rounding == "power_of_two"

    def spread(self, scale) -> np.ndarray:
        """Each of the scales, or whatever there is one of for each, repeated over its elements."""
        scale = np.asarray(scale)
        if scale.ndim == 0:
            return np.broadcast_to(scale, self.shape)
        for axis, (n, b) in enumerate(zip(self.shape, self.block, strict=True)):
            scale = np.repeat(scale, b, axis).take(np.arange(n), axis)
        return scale

    def amax(self, x) -> np.ndarray:
        """The largest magnitude of what shares a scale with each element, f64."""
        index = self.spread(np.arange(math.prod(self.scale_shape)).reshape(self.scale_shape))
        largest = np.zeros(math.prod(self.scale_shape))
        np.maximum.at(largest, index.ravel(), np.abs(f64(x)).ravel())
        return largest[index]


SHAPES = [
    *((), (0,), (1,), (5,), (33,)),
    *((3, 0), (1, 7), (5, 40), (33, 2), (130, 140)),
    *((2, 3, 4), (2, 1, 33), (0, 2, 3), (2, 2, 3, 3), (1, 2, 1, 5, 3)),
]
NAMED = [(1, 16), (1, 32), (1, 128), (32, 32), (128, 128)]  # NVFP4, MX, DeepSeek


@st.composite
def granularities(draw, shape):
    ndim = len(shape)
    kinds = [st.just(PerTensor()), st.builds(Block, st.tuples(*[st.integers(1, 4)] * ndim))]
    if ndim:
        axes = st.lists(st.integers(-ndim, ndim - 1), min_size=1, max_size=2).map(tuple)
        kinds += [st.builds(PerAxis, st.integers(-ndim, ndim - 1)), st.builds(PerAxis, axes)]
    if ndim >= 2:
        kinds.append(st.builds(Block, st.sampled_from(NAMED)))
    return draw(st.one_of(kinds))


@st.composite
def cases(draw, *, dtypes=(jnp.float32, jnp.float32, *NARROW), roundings=ROUNDINGS, shapes=SHAPES):
    shape = draw(st.sampled_from(shapes))
    return Case(
        shape,
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from([E4M3FN, E5M2, E3M4, E2M1FN])),
        draw(granularities(shape)),
        draw(st.sampled_from([None, "power_of_two", *E8M0_MODES])),
        draw(st.sampled_from(roundings)),
    )


KINDS = (
    "normal",
    "wide",
    "of the format",
    "near ties",
    "constant",
    "outlier",
    "empty blocks",
    "tiny",
)
seeds = st.integers(0, 2**32 - 1)


def sample(case, seed, kind) -> np.ndarray:
    """Random values of one kind, a few zeros of either sign among them, below 2^127."""
    rng = np.random.default_rng(seed)
    info, shape = jnp.finfo(case.dtype), case.shape
    top, bottom = (15, -14) if case.dtype == jnp.float16 else (90, -90)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 4, shape))
    if kind == "wide":
        x = np.clip(rng.normal(size=shape), -1, 1) * np.exp2(rng.integers(bottom, top, shape))
    elif kind == "of the format":
        table = values_of(np.arange(case.fmt.max_code + 1).astype(np.uint8), case.fmt)
        x = rng.choice(table, shape) * rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-8, 0)
    elif kind == "constant":
        x = np.full(shape, rng.normal())
    elif kind == "outlier":
        x = np.where(rng.random(shape) < 0.1, 2.0**top * rng.uniform(0.5, 1, shape), x)
    elif kind == "empty blocks":
        x = x * case.spread(rng.random(case.scale_shape) < 0.5)
    elif kind == "tiny":
        x = x * float(info.smallest_normal)
    x = next_to_ties(case, x, rng)
    return np.where(rng.random(shape) < 0.1, np.copysign(0.0, x), x).astype(case.dtype)


def next_to_ties(case, x, rng) -> np.ndarray:
    """Move half of `x` next to the ends of steps, by 2^-20, where an error of a scale shows."""
    scale = case.amax(x) / case.fmt.max if case.scale_rounding is None else np.ones(x.shape)
    v = np.divide(np.abs(x), scale, out=np.zeros_like(scale), where=scale > 0)
    step = np.exp2(np.frexp(v)[1] - 1.0 - case.fmt.mantissa_bits)
    tie = (np.floor(v / step) + 0.5) * step
    chosen = (rng.random(x.shape) < 0.5) & (v >= case.fmt.smallest_normal) & (tie < case.fmt.max)
    moved = np.copysign(tie * scale * (1 + rng.choice([-1, 1], x.shape) * 2.0**-20), x)
    return np.where(chosen, moved, x)


# The code under test: one program for each case, which all tests call


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(case, x, key=KEY):
    q = quantize(
        x,
        case.fmt,
        granularity=case.granularity,
        scale_rounding=case.scale_rounding,
        rounding=case.rounding,
        key=key,
    )
    return q, dequantize(q)


def grid_error(a, scale, fmt, rounding) -> np.ndarray:
    """How far a rounding to ``scale * fmt`` may be from magnitudes `a`, by the format alone.

    Half of the spacing: ``2^(e-m-1)`` of a normal value between ``2^e`` and ``2^(e+1)``, which is
    ``2^-(m+1)`` of it at most, and half of the smallest value below. All of the spacing if the
    rounding is directed. Beyond the largest value, what is cut off; of a scale of zero, all.
    """
    ratio = np.divide(a, scale, out=np.zeros_like(a), where=scale > 0)
    e = np.frexp(np.clip(ratio, fmt.smallest_normal, fmt.max))[1] - 1
    steps = 0.5 if rounding == "nearest_even" else 1.0
    inside = steps * np.ldexp(scale, e - fmt.mantissa_bits)
    return np.maximum(inside, a - fmt.max * scale)


@given(cases(), seeds, st.sampled_from(KINDS))
def test_every_element_is_within_half_a_step(case, seed, kind):
    """Half a step of its scaled format away, and nothing saturates, whatever is drawn.

    Around the rounding there are three operations in f32, each exact with powers of two: the
    reciprocal, and two multiplications. Only the modes that say so give a scale that is too small.
    """
    x = sample(case, seed, kind)
    q, values = there_and_back(case, x)
    assert (q.shape, q.scale.shape, values.dtype) == (x.shape, case.scale_shape, jnp.float32)
    assert q.block == (case.block if case.ragged else None)
    scale, a, largest = case.spread(f64(q.scale)), np.abs(f64(x)), case.amax(x)
    assert_scale_fits(case, scale, largest)
    slack = 0 if case.powers_of_two else 3 * UNIT * a
    slack = slack + (0 if case.e8m0 else 2 * FLUSHED)
    error = np.abs(f64(values) - f64(x))
    assert np.all(error <= grid_error(a, scale, case.fmt, case.rounding) + slack)
    if case.rounding == "toward_zero":
        assert np.all(np.abs(f64(values)) <= a + slack)


def assert_scale_fits(case, scale, largest):
    """Neither too small, so that something saturates, nor more than twice as large as need be."""
    fmt, some = case.fmt, largest > 0
    zero = 2.0**-127 if case.e8m0 else 1.0
    assert np.all(scale[~some] == zero)
    scale, largest = scale[some], largest[some]
    smallest = 2.0**-127 if case.e8m0 else 2.0**-126
    clipped = scale == smallest
    if case.scale_rounding is None:
        error = np.abs(scale * fmt.max - largest)
        assert np.all((error <= UNIT * scale * fmt.max) | clipped & (largest < smallest * fmt.max))
        return
    assert np.all(np.frexp(scale)[0] == 0.5)
    if case.scale_rounding in ("floor", "even"):
        # The leading bit of amax is that of fmt.max, and "even" rounds amax to the format before.
        above = 2.0**-fmt.mantissa_bits / 2 if case.scale_rounding == "even" else 0.0
        power = 2.0**fmt.max_exponent
        assert np.all((largest < 2 * scale * power) | clipped)
        assert np.all((scale * power <= largest * (1 + above)) | clipped)
        return
    top = 2.0**fmt.max_exponent if case.scale_rounding == "ceil" else fmt.max
    assert np.all(largest <= scale * top)
    assert np.all((scale * top < 2 * largest) | clipped)


@given(cases(), seeds, st.integers(-8, 8))
def test_quantizing_commutes_with_signs_and_powers_of_two(case, seed, k):
    """Data is the same but for the sign, and scales times 2^k; zeros keep their sign."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(2.0**-4, 2.0**4, case.shape) * rng.choice([-1, 0, 1], case.shape)
    x = np.asarray(x * case.spread(rng.random(case.scale_shape) < 0.8)).astype(case.dtype)
    q, values = there_and_back(case, x)
    negative, negative_values = there_and_back(case, -x)
    larger, larger_values = there_and_back(case, np.ldexp(f64(x), k).astype(case.dtype))
    sign = np.uint8(1 << case.fmt.bits - 1)
    np.testing.assert_array_equal(codes(negative.data), codes(q.data) ^ sign)
    np.testing.assert_array_equal(codes(larger.data), codes(q.data))
    np.testing.assert_array_equal(f64(negative.scale), f64(q.scale))
    some = case.amax(x) > 0
    before, after = (case.spread(f64(p.scale)) for p in (q, larger))
    np.testing.assert_array_equal(after, np.where(some, np.ldexp(before, k), before))
    np.testing.assert_array_equal(negative_values, -np.asarray(values))
    np.testing.assert_array_equal(larger_values, np.ldexp(np.asarray(values), k))
    zeros = f64(x) == 0
    np.testing.assert_array_equal(f64(values)[zeros], 0)
    np.testing.assert_array_equal(np.signbit(values)[zeros], np.signbit(f64(x))[zeros])


@given(cases(), seeds, st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=3))
def test_what_is_not_finite_shows_and_spoils_no_more_than_its_block(case, seed, bad):
    """NaN in all that shares a scale in blocks, with E8M0 scales, and in formats without NaN.

    Else where it stands only, and the scale is 1. All other groups are, bit by bit, as without it.
    """
    assume(math.prod(case.shape) > 0)
    x = sample(case, seed, "normal")
    clean, clean_values = there_and_back(case, x)
    rng = np.random.default_rng(seed)
    where = np.zeros(x.shape, bool)
    where.flat[rng.integers(0, x.size, len(bad))] = True
    spoiled = x.copy()
    spoiled[where] = rng.choice(bad, where.sum())
    q, values = there_and_back(case, spoiled)
    group = case.amax(where) > 0
    whole = isinstance(case.granularity, Block) or case.e8m0 or not case.fmt.has_nan
    np.testing.assert_array_equal(np.isnan(values), group if whole else where)
    assert not np.any(np.isinf(values))
    np.testing.assert_array_equal(codes(q.data)[~group], codes(clean.data)[~group])
    np.testing.assert_array_equal(np.asarray(values)[~group], np.asarray(clean_values)[~group])
    scale = case.spread(f64(q.scale))
    np.testing.assert_array_equal(scale[group], np.nan if whole else 1.0)


@functools.partial(jax.jit, static_argnums=(0, 2))
def two_levels(quantizer, x, contracting):
    q = quantizer(x, Context((contracting,), amax(x)))
    return q, dequantize(q)


@given(
    st.sampled_from([(3, 5), (16, 40), (40, 33), (2, 20, 3), (0, 4)]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([((16, 1), 0), ((16, 1), 1), ((16, 16), 1), ((4, 2), 1)]),
    seeds,
    st.sampled_from(["normal", "outlier", "empty blocks", "constant"]),
    st.sampled_from([np.nan, np.inf]),
)
def test_two_levels_of_scales(shape, dtype, how, seed, kind, bad):
    """NVFP4's bounds, and blocks that are not finite.

    A scale is rounded to e4m3: by up to 2^-4 of itself, or half of 2^-9 where it is subnormal, both
    times ``6 * amax / (6 * 448)``. Where it came out too small, the top of the block saturates.
    """
    size, along = how
    contracting = len(shape) - 2 + along
    block = size if along == 0 else size[::-1]
    case = Case(shape, dtype, E2M1FN, Block(block), None, "nearest_even")
    x = sample(case, seed, kind)
    quantizer = TwoLevel(E2M1FN, size)
    q, values = two_levels(quantizer, x, contracting)
    assert q.scale.shape == case.scale_shape
    a, largest, tensor = np.abs(f64(x)), case.amax(x), np.max(np.abs(f64(x)), initial=0)
    scale = case.spread(f64(q.scale.data)) * f64(q.scale.scale)
    few = 8 * UNIT
    error = np.abs(f64(values) - f64(x))
    assert np.all(error <= grid_error(a, scale, E2M1FN, "nearest_even") + few * a)
    rounding = np.maximum(2.0**-4 * largest, 2.0**-10 / 448 * tensor)
    assert np.all(np.abs(6 * scale - largest) <= rounding + few * tensor)

    if x.size:
        at = np.random.default_rng(seed).integers(0, x.size)
        group = case.amax(np.arange(x.size).reshape(shape) == at) > 0
        clean, clean_values = two_levels(quantizer, np.where(group, 0, x), contracting)
        spoiled = x.copy()
        spoiled.flat[at] = bad
        q, values = two_levels(quantizer, spoiled, contracting)
        np.testing.assert_array_equal(np.isnan(values), group)
        np.testing.assert_array_equal(codes(q.data)[~group], codes(clean.data)[~group])
        np.testing.assert_array_equal(np.asarray(values)[~group], np.asarray(clean_values)[~group])
