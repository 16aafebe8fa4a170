"""Attend to f8 matrices on Hopper's tensor cores, forward and backward.

A block computes 128 rows of a result. Two warpgroups take 64 of these each, and loop over the
blocks of tokens that one of their own sees, as in the forward pass::

    copies        0 | 1 | 2 | (0 is free) 3 | ...
    warpgroup 0   q.k  softmax      p.v  q.k  softmax      p.v  q.k ...
    warpgroup 1        q.k      softmax  p.v  q.k      softmax  p.v ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash import launch, tiles
from jfp8.kernels.flash.problem import BLOCK, QUERIES, WORD, Bounds, Problem
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.flash.tile_work import TileWork
from jfp8.kernels.flash.tiles import BackwardTile, ForwardTile, KeyTile
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS, cut, multiply, slices
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, tile

# Tokens of a step whose scales are in registers at the same time.
PART = 64
OF_KEYS, OF_QUERIES = slices(BLOCK, PART), slices(QUERIES, 16)


@dataclasses.dataclass(frozen=True)
class ForwardByWgmma(ForwardTile):
    """Compute attention of a tile of queries, and the logarithm of the denominator."""

    name = "attention"
    slots = 2

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {"weights": tile((COMPUTE, ROWS, BLOCK), jnp.float8_e4m3fn)}

    def attend(self) -> None:
        _, row, factor = self.begin(BY_ROW)
        totals = [filled(0.0, (ROWS, part.size), BY_ELEMENT) for part in self.columns()]
        carry = totals, filled(-jnp.inf, (ROWS,), BY_ROW), filled(0.0, (ROWS,), BY_ROW)
        bounds = self.bounds()
        start, stop = self.steps(bounds)
        branch = self.p.size <= 128
        mask = masks_of(self, bounds, row, bounded=self.bounded(), branch=branch)

        def step(t, carry):
            slot = lax.rem(t - start, self.stages)
            return self.step(factor, mask(t, slot), slot, carry)

        totals, highest, sums = lax.fori_loop(start, stop, step, carry)
        (out, lse), rows = self.results, pl.ds(row, ROWS)
        lse[self.head, rows], inverse = tiles.ended(highest, sums)
        parts = [x * along(inverse, x.shape, 0) for x in totals]
        staged = self.memory.staged.at[lax.axis_index("warpgroup")]
        store(parts, staged, head_of(out, self.head).at[rows])

    def columns(self) -> list[Any]:
        """Return the columns of the output, in slices whose sums fit the remaining registers."""
        return slices(self.p.size, min(self.p.size, 128))

    def step(self, factor: jax.Array, mask: Mask, slot: jax.Array, carry: Any) -> Any:
        """Add one block of keys."""
        (total, highest, sums), m = carry, self.memory
        mine = lax.axis_index("warpgroup")  # recomputed, because keeping it would take a register
        weights = m.weights.at[mine]
        plgpu.barrier_wait(m.full.at[slot])
        unit = self.unit(slot, mask)

        (s,) = multiply((m.queries.at[mine], m.key_ring.at[slot]))
        scales = [load(m.k_scale_ring.at[slot, part], BY_COLUMN) for part in OF_KEYS]
        s = [x * along(scale, x.shape, 1) for x, scale in zip(cut(s, OF_KEYS), scales, strict=True)]
        s = mask.hide(s, -jnp.inf, OF_KEYS)

        largest = jnp.max(reduce(jnp.maximum, s), axis=1)
        highest, shift, shrink = tiles.raised(highest, largest, factor, unit)
        added, made = [], []
        for part, x in zip(OF_KEYS, s, strict=True):
            p = tiles.probabilities(x, factor, shift)
            added.append(jnp.sum(p, axis=1))
            p = p * along(load(m.v_scale_ring.at[slot, part], BY_COLUMN), p.shape, 1)
            made.append(p.astype(weights.dtype))
        sums = sums * shrink + reduce(jnp.add, added) * unit
        weights[...] = jnp.concatenate(made, 1)
        plgpu.commit_smem()

        for n, part in enumerate(self.columns()):
            (added,) = multiply((weights, m.value_ring.at[slot, part]))
            added = added * along(unit, added.shape, 0)
            total[n] = total[n] * along(shrink, added.shape, 0) + added
        release(m.empty.at[slot])
        return total, highest, sums

    def unit(self, slot: jax.Array, mask: Mask) -> jax.Array:
        """Return the largest scale of the values that each query sees: f32[ROWS]."""
        scales = lambda part: load(self.memory.v_scale_ring.at[slot, part], BY_COLUMN)

        def all_seen():
            largest = jnp.max(reduce(jnp.maximum, map(scales, OF_KEYS)))
            return filled(largest, (ROWS,), BY_ROW)

        def some_seen():
            seen = lambda part: mask.where(along(scales(part), (ROWS, PART), 1), 0.0, part.start)
            return jnp.max(reduce(jnp.maximum, map(seen, OF_KEYS)), axis=1)

        return jnp.maximum(mask.choose(all_seen, some_seen), tiles.SMALLEST_UNIT)


@dataclasses.dataclass(frozen=True)
class QueryGradientByWgmma(BackwardTile):
    """Compute dQ of a tile of queries, and the largest ``|dS|`` of each."""

    name = "attention_dq"

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {"weights": tile((COMPUTE, ROWS, BLOCK), p.formats[0].dtype)}

    def attend(self) -> None:
        mine, row, of_row = self.begin(BY_ROW)
        bounds = self.bounds()
        start, stop = self.steps(bounds)
        mask = masks_of(self, bounds, row, bounded=self.bounded(), branch=False)

        def step(t, carry):
            slot = lax.rem(t - start, self.stages)
            return self.step(mine, of_row, mask(t, slot), slot, carry)

        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT), filled(0.0, (ROWS,), BY_ROW)
        total, found = lax.fori_loop(start, stop, step, zeros)
        (dq, largest), rows = self.results, pl.ds(row, ROWS)
        largest[self.head, rows] = found
        target = head_of(dq, self.head).at[rows]
        store([total * self.p.scale], self.memory.staged.at[mine], target)

    def step(self, mine: Any, of_row: list[jax.Array], mask: Mask, slot: Any, carry: Any) -> Any:
        """Add one block of keys."""
        m = self.memory
        total, largest = carry
        weights = m.weights.at[mine]
        plgpu.barrier_wait(m.full.at[slot])
        s, dp = multiply(
            (m.queries.at[mine], m.key_ring.at[slot]),
            (m.grads.at[mine], m.value_ring.at[slot]),
        )
        by_row = lambda n, x: along(of_row[n], x.shape, 0)
        vector = lambda n, part: load(m.scale_ring.at[slot, n, part], BY_COLUMN)
        by_key = lambda n, x, part: along(vector(n, part), x.shape, 1)

        p = [
            jnp.exp2(x * by_key(0, x, part) * by_row(0, x) - by_row(1, x))
            for x, part in zip(cut(s, OF_KEYS), OF_KEYS, strict=True)
        ]
        p = mask.hide(p, 0.0, OF_KEYS)

        made, largest_scaled = [], []
        for x, y, part in zip(p, cut(dp, OF_KEYS), OF_KEYS, strict=True):
            x = x * (y * by_key(1, x, part) * by_row(2, x) - by_row(3, x))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2, x, part)
            largest_scaled.append(jnp.max(jnp.abs(x), axis=1))
            made.append(x)
        largest_scaled = reduce(jnp.maximum, largest_scaled)
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")
        made = [(x * along(inverse, x.shape, 0)).astype(weights.dtype) for x in made]
        weights[...] = jnp.concatenate(made, 1)
        plgpu.commit_smem()
        (added,) = multiply((weights, m.k_t_ring.at[slot]))
        release(m.empty.at[slot])
        return total + added * along(scale, added.shape, 0), largest


@dataclasses.dataclass(frozen=True)
class KeyGradientsByWgmma(KeyTile):
    """Compute dK and dV of a tile of keys."""

    name = "attention_dkv"

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {
            "weights": tile((COMPUTE, ROWS, QUERIES), jnp.float8_e4m3fn),
            "scores": tile((COMPUTE, ROWS, QUERIES), p.formats[1].dtype),
        }

    def attend(self) -> None:
        by_key = self.given["by_key"].at[self.head]
        of_rows = lambda rows: [load(by_key.at[n, rows], BY_ROW) for n in range(2)]
        mine, row, of_row = self.take(of_rows)
        steps = self.steps()
        one_sided = self.p.left is None or self.p.right is None
        mask = masks_of(self, self.bounds(), row, bounded=self.p.windowed, branch=one_sided)

        def step(i, carry):
            head, t = self.at(i, steps)
            slot = lax.rem(i, self.stages)
            unit = self.given["unit"][head, t]
            return self.step(mine, of_row, mask(t, slot), unit, slot, carry)

        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        dk, dv = lax.fori_loop(0, self.count(steps), step, (zeros, zeros))
        for x, to in zip((dk * self.p.scale, dv), self.results, strict=True):
            target = head_of(to, self.head).at[pl.ds(row, ROWS)]
            store([x], self.memory.staged.at[mine], target)

    def step(
        self, mine: Any, of_row: list[jax.Array], mask: Mask, unit: Any, slot: Any, carry: Any
    ) -> Any:
        """Add one block of queries."""
        m = self.memory
        dk, dv = carry
        weights, scores = m.weights.at[mine], m.scores.at[mine]
        plgpu.barrier_wait(m.full.at[slot])
        s, dp = multiply(
            (m.keys.at[mine], m.query_ring.at[slot]),
            (m.values.at[mine], m.grad_ring.at[slot]),
        )
        by_row = lambda n, x: along(of_row[n], x.shape, 0)
        vector = lambda n, part: load(m.vector_ring.at[slot, n, part], BY_COLUMN)
        by_query = lambda n, x, part: along(vector(n, part), x.shape, 1)

        p = [
            jnp.exp2(x * by_row(0, x) * by_query(0, x, part) - by_query(1, x, part))
            for x, part in zip(cut(s, OF_QUERIES), OF_QUERIES, strict=True)
        ]
        p = mask.hide(p, 0.0, OF_QUERIES)
        made = [x * by_query(4, x, part) for x, part in zip(p, OF_QUERIES, strict=True)]
        weights[...] = jnp.concatenate(made, 1).astype(weights.dtype)

        def differentiate(x, y, part):
            y = x * (y * by_row(1, x) * by_query(2, x, part) - by_query(3, x, part))
            return y * by_query(5, x, part)

        ds = jnp.concatenate(list(map(differentiate, p, cut(dp, OF_QUERIES), OF_QUERIES)), 1)
        largest = jnp.max(jnp.abs(ds), axis=1)
        scale, inverse = scale_and_inverse(largest, self.p.formats[1], "power_of_two")
        scores[...] = (ds * along(inverse, ds.shape, 0)).astype(scores.dtype)
        plgpu.commit_smem()
        (added,) = multiply((weights, m.grad_t_ring.at[slot]))
        dv = dv + added * unit
        (added,) = multiply((scores, m.q_t_ring.at[slot]))
        release(m.empty.at[slot])
        return dk + added * along(scale, added.shape, 0), dv


# Keys that queries do not see, in registers in the layout of wgmma.


@dataclasses.dataclass(frozen=True)
class Mask:
    """Compute which keys of a block each query sees."""

    bounds: Bounds  # of the head
    row: jax.Array  # the first query
    key: jax.Array
    sees_all: jax.Array | None  # True if all queries see all keys; None if that is statically known
    branch: bool  # True to compute a mask only if needed; branches cost registers
    words: Any = None  # of a mask's bits for these queries, in shared memory; None without a mask

    def choose(
        self, all_seen: Callable[..., Any], some_seen: Callable[..., Any], *args: Any
    ) -> Any:
        """Return ``all_seen(*args)`` if all queries see all keys, else ``some_seen(*args)``."""
        if self.words is None and self.sees_all is None:
            return all_seen(*args)
        if self.words is not None or not self.branch:
            return some_seen(*args)
        return lax.cond(self.sees_all, all_seen, some_seen, *args)

    def where(self, x: jax.Array, otherwise: float, start: int) -> jax.Array:
        """Return `x`, for keys of the block from `start` on, or `otherwise` if one is not seen."""
        if self.sees_all is not None:
            x = _where_seen(self.bounds, x, otherwise, self.row, self.key + start)
        return x if self.words is None else _where_shown(x, otherwise, self.words, start)

    def hide(self, xs: list[jax.Array], otherwise: float, parts: list[Any]) -> list[jax.Array]:
        """Return slices of the block with `otherwise` where a key is not seen."""
        hidden = lambda xs: [
            self.where(x, otherwise, part.start) for x, part in zip(xs, parts, strict=True)
        ]
        return self.choose(lambda xs: xs, hidden, xs)


def masks_of(
    work: TileWork, bounds: Bounds, row: jax.Array, *, bounded: bool, branch: bool
) -> Callable[[jax.Array, jax.Array], Mask]:
    """Return a function that computes the mask of block `t`, in a slot, for rows from `row` on.

    `bounded` is True if `bounds` may hide anything; see `Mask` for `branch`.
    """
    _, first_full, end_full, _ = bounds.blocks(row, ROWS, work.width)

    def mask(t: jax.Array, slot: jax.Array) -> Mask:
        sees_all = (t >= first_full) & (t < end_full) if bounded else None
        words = None
        if "bits" in work.given:
            words = work.memory.bits_ring.at[slot, :, pl.ds(row - work.row, ROWS)]
        return Mask(bounds, row, t * work.width, sees_all, branch, words)

    return mask


def _where_seen(
    bounds: Bounds, x: jax.Array, otherwise: float, row: jax.Array, first: jax.Array
) -> jax.Array:
    """Return `x`, or `otherwise` where a query from `row` on does not see a key from `first` on.

    A thread has the columns c + own, for constants c and an `own` of the bits 1 and 2. On opposite
    sides of a comparison they cost one instruction per column. Otherwise the compiler would compute
    their sums before the loop, and keep them in registers.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BY_ELEMENT)
    query = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=BY_ROW) + (row - first)

    def below(n: jax.Array) -> jax.Array:
        constant, own = column & ~6, column & 6
        return constant < along(n, x.shape, 0) - own

    return bounds.where_seen(x, otherwise, query, first, below)


def _where_shown(x: jax.Array, otherwise: float, words: Any, start: int) -> jax.Array:
    """Return `x`, or `otherwise` where a bit of ``words[width / 32, rows]`` is 0.

    `x` has the columns of the block from `start` on, within one word or in whole words.
    """
    columns = min(WORD, x.shape[1])
    shape = x.shape[0], columns
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_ELEMENT)
    # As in `_where_seen`, a thread shifts a word once by its own offset, and then by constants.
    # Bits become signs, because the compiler spills with heads of 256 if bits are compared to 0.
    constant, own = (column & ~6) + start % WORD, column & 6
    parts = []
    for c in range(0, x.shape[1], columns):
        word = along(load(words.at[(start + c) // WORD], BY_ROW), shape, 0)
        bit = (word << (6 - own)) << (25 - constant)
        parts.append(jnp.where(bit < 0, x[:, c : c + columns], otherwise))
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


attention_forward = partial(launch.attention_forward, ForwardByWgmma)
attention_backward = partial(launch.attention_backward, QueryGradientByWgmma, KeyGradientsByWgmma)
