"""Compute attention on Hopper's tensor cores: both matmuls, and the softmax between them.

A block computes 128 rows of the output. Both multiplying warpgroups take 64 queries each, and
loop over the blocks of keys that one of these queries sees::

    copies        0 | 1 | 2 | (0 is free) 3 | ...
    warpgroup 0   q.k  softmax      p.v  q.k  softmax      p.v  q.k ...
    warpgroup 1        q.k      softmax  p.v  q.k      softmax  p.v ...
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash import softmax
from jfp8.kernels.flash.problem import BLOCK, Problem
from jfp8.kernels.flash.query_tile import ForwardTile
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.hopper.hidden_keys import Mask, masks_of
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS, cut, multiply, slices
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, tile

PART = 64  # keys whose scales are in registers at the same time
PARTS = slices(BLOCK, PART)


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
        lse[self.head, rows] = softmax.log_sum(highest, sums)
        inverse = softmax.inverse(sums)
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
        scales = [load(m.k_scale_ring.at[slot, part], BY_COLUMN) for part in PARTS]
        s = [x * along(scale, x.shape, 1) for x, scale in zip(cut(s, PARTS), scales, strict=True)]
        s = mask.hide(s, -jnp.inf, PARTS)

        largest = jnp.max(functools.reduce(jnp.maximum, s), axis=1)
        highest, shift, shrink = softmax.raised(highest, largest, factor, unit)
        added, made = [], []
        for part, x in zip(PARTS, s, strict=True):
            p = softmax.probabilities(x, factor, shift)
            added.append(jnp.sum(p, axis=1))
            p = p * along(load(m.v_scale_ring.at[slot, part], BY_COLUMN), p.shape, 1)
            made.append(p.astype(weights.dtype))
        sums = sums * shrink + functools.reduce(jnp.add, added) * unit
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
            largest = jnp.max(functools.reduce(jnp.maximum, map(scales, PARTS)))
            return filled(largest, (ROWS,), BY_ROW)

        def some_seen():
            seen = lambda part: mask.where(along(scales(part), (ROWS, PART), 1), 0.0, part.start)
            return jnp.max(functools.reduce(jnp.maximum, map(seen, PARTS)), axis=1)

        return jnp.maximum(mask.choose(all_seen, some_seen), softmax.SMALLEST_UNIT)
