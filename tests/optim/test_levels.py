"""Second moments in 8 bits without a sign: `Blocks` of E8M0FNU.

Oracle: the rule in float64, from the docstring of `jfp8.optim.levels`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import E4M3FN, E8M0FNU
from jfp8.optim.adam import adam
from jfp8.optim.blocks import Blocks, ExpandedArray
from jfp8.scaling.random_bits import fold_in

SEED = jnp.asarray([3, 7], jnp.uint32)
NEAREST = Blocks(E8M0FNU, transform="expand")
LOT = Blocks(E8M0FNU, transform="expand", rounding="stochastic")


def squares(shape=(6, 300), seed=0, size=1e-8) -> np.ndarray:
    """Heavy-tailed, with zeros, of a size that differs from row to row; the last block is cut."""
    rng = np.random.default_rng(seed)
    x = size * rng.normal(size=shape) ** 6 * 10.0 ** rng.uniform(-4, 4, (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.02, 0, x).astype(np.float32)


def encode(storage: Blocks, x, seed=SEED) -> ExpandedArray:
    return jax.jit(storage.encode)(jnp.asarray(x, jnp.float32), seed)


def decode(kept: ExpandedArray) -> np.ndarray:
    return np.array(jax.jit(LOT.decode)(kept))


def round_trip(storage: Blocks, x, seed=SEED) -> np.ndarray:
    return decode(encode(storage, x, seed))


def codes(kept: ExpandedArray) -> np.ndarray:
    return np.asarray(kept.data).view(np.uint8)


def levels(part: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Of one block ``top``, ``n``, and where its elements but zero lie between codes."""
    a = part[part > 0].astype(np.float64)
    top = 2.0 ** np.ceil(np.log2(a.max()))
    binades = np.clip(np.log2(top) - np.floor(np.log2(a.min())), 1, 48)
    allowed = [n for n in range(1, 129) if n < 8 or n % 2 ** (n.bit_length() - 3) == 0]
    n = max(n for n in allowed if n * binades <= 253)
    with np.errstate(divide="ignore"):
        return top, n, 254 + n * np.log2(part.astype(np.float64) / top)


def test_the_rule_in_float64():
    x = squares()
    kept = encode(NEAREST, x)
    decoded = decode(kept)
    for row in range(len(x)):
        for i, start in enumerate(range(0, 300, 128)):
            part = x[row, start : start + 128]
            top, n, level = levels(part)
            assert (kept.amax[row, i], kept.power[row, i]) == (top, n)
            here = codes(kept)[row, start : start + 128]
            exact = np.where(part > 0, np.clip(np.round(level), 1, 254), 0)
            level = np.maximum(level, 0)
            tie = np.abs(level % 1 - 0.5) < 1e-3
            np.testing.assert_array_equal(here[~tie], exact[~tie])
            expected = np.where(here > 0, top * 2.0 ** ((here - 254.0) / n), 0)
            np.testing.assert_allclose(decoded[row, start : start + 128], expected, rtol=4e-6)


def test_the_logarithm_is_right_on_average():
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-8, 0, (4, 160))).astype(np.float32)
    draws = 2000
    seeds = jax.vmap(functools.partial(fold_in, SEED))(jnp.arange(draws, dtype=jnp.uint32))
    kept = jax.jit(jax.vmap(lambda seed: LOT.encode(jnp.asarray(x), seed)))(seeds)
    drawn, off = codes(kept).astype(np.float64), []
    for row, start in ((0, 0), (3, 128)):
        _, _, level = levels(x[row, start : start + 128])
        mean = drawn[:, row, start : start + 128].mean(0)
        # 5 standard deviations of a lot between two neighbours, and what f32 makes of a logarithm.
        sd = np.sqrt((level - np.floor(level)) * (np.ceil(level) - level) / draws)
        assert np.all(np.abs(mean - level) <= 5 * sd + 1e-3)
        assert np.all(np.abs(drawn[:, row, start : start + 128] - level) < 1.001)
        off += list(mean - level)
    # Drawn by the distances of values, they would be 0.007 too high.
    assert abs(np.mean(off)) < 5 * 0.5 / np.sqrt(draws * len(off))


def test_the_grid_stands_still():
    """What was stored is stored as it is, by lot too, also when the largest grows by a binade."""
    largest = np.arange(256) % 128 == 0
    x = 10.0 ** np.random.default_rng(0).uniform(-4, -0.1, (8, 256))  # 14 binades, then 15
    once = round_trip(LOT, np.where(largest, 1, x))
    for size, top in ((1, 1), (1.9, 2)):
        grown = np.where(largest, size, once)
        kept = encode(LOT, grown, SEED + np.uint32(1))
        assert np.all(np.asarray(kept.amax, np.float32) == top)
        # f32's logarithm of a level is no whole number, but so near that no lot of these differs.
        np.testing.assert_allclose(decode(kept)[:, ~largest], once[:, ~largest], rtol=1e-6)


@pytest.mark.parametrize("storage", [NEAREST, LOT], ids=["nearest", "stochastic"])
def test_zero_is_for_zero_alone(storage):
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
def test_what_cannot_be_kept_shows(bad):
    """A negative number, too: its sign would be lost."""
    x = squares()
    x[2, 130] = bad
    decoded = round_trip(LOT, x)
    assert np.isnan(decoded[2, 128:256]).all()
    decoded[2, 128:256] = 0
    assert np.isfinite(decoded).all()
    x[2, 130] = -0.0
    assert round_trip(LOT, x)[2, 130] == 0


def test_a_moment_of_before_is_read_in_its_own_format():
    """States of E4M3, expanded or not, go on in levels."""
    x = squares()
    for before in (Blocks(transform="expand"), Blocks()):
        kept = encode(before, x)
        np.testing.assert_array_equal(decode(kept), np.asarray(jax.jit(before.decode)(kept)))


def test_mistakes_are_told():
    with pytest.raises(TypeError, match="never negative.*Blocks.jfp8.E8M0FNU, transform='expand'"):
        Blocks(E8M0FNU)
    with pytest.raises(ValueError, match="mu=Blocks.fmt=.*has no sign, but a first moment has one"):
        adam(1e-3, mu=NEAREST)
    assert adam(1e-3, mu=Blocks(E4M3FN), nu=NEAREST)
