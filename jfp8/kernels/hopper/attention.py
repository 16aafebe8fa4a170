"""Attend to f8 matrices on Hopper's tensor cores, forward and backward.

A block computes 128 rows of a result. Two warpgroups take 64 of these each, and loop over the
blocks of tokens that one of their own sees, as in the forward pass::

    copies        0 | 1 | 2 | (0 is free) 3 | ...
    warpgroup 0   q.k  softmax      p.v  q.k  softmax      p.v  q.k ...
    warpgroup 1        q.k      softmax  p.v  q.k      softmax  p.v ...
"""

from __future__ import annotations

import dataclasses
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash import launch, softmax
from jfp8.kernels.flash.problem import BLOCK, QUERIES, Problem
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.flash.tiles import BackwardTile, ForwardTile, KeyTile
from jfp8.kernels.hopper.hidden_keys import Mask, masks_of
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
        lse[self.head, rows], inverse = softmax.ended(highest, sums)
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
        highest, shift, shrink = softmax.raised(highest, largest, factor, unit)
        added, made = [], []
        for part, x in zip(OF_KEYS, s, strict=True):
            p = softmax.probabilities(x, factor, shift)
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

        return jnp.maximum(mask.choose(all_seen, some_seen), softmax.SMALLEST_UNIT)


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


attention_forward = partial(launch.attention_forward, ForwardByWgmma)
attention_backward = partial(launch.attention_backward, QueryGradientByWgmma, KeyGradientsByWgmma)
