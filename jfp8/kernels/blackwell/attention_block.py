"""Compute attention on Blackwell's tensor cores: both matmuls, and the softmax between them.

A block computes 256 rows of the output. Both multiplying warpgroups take 128 queries each, and
loops over the blocks of 128 keys that one of these queries sees. Each starts its own matmuls, so
that one multiplies while the other computes its softmax. In tensor memory, a warpgroup stores the
scores, later overwritten by ``w . v``, and next to them the weights `w` in f8, which the tensor
cores read. Sums over blocks are in registers: ``w . v`` of each block has a separate scale.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell import tcgen05
from jfp8.kernels.blackwell.tcgen05 import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS
from jfp8.kernels.flash import softmax
from jfp8.kernels.flash.problem import BLOCK, Bounds, Problem
from jfp8.kernels.flash.query_tile import ForwardTile
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release


@dataclasses.dataclass(frozen=True)
class ForwardByTcgen05(ForwardTile):
    """Compute attention of a tile of queries, and the logarithm of the denominator."""

    name = "attention_blackwell"
    tokens = COMPUTE * ROWS

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {
            "scores": tcgen05.sums(BLOCK),
            "weights": tcgen05.factors(BLOCK, jnp.float8_e4m3fn),
            "ready": tcgen05.ordered(),
            "done": tcgen05.ordered(),
        }

    def attend(self) -> None:
        mine, row, factor = self.begin(BY_ROW)
        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        bounds = self.bounds()
        start, stop = self.steps(bounds)

        def step(t, carry):
            return self.step(mine, factor, bounds, row, t, t - start, carry)

        carry = zeros, filled(-jnp.inf, (ROWS,), BY_ROW), filled(0.0, (ROWS,), BY_ROW)
        total, highest, sums = lax.fori_loop(start, stop, step, carry)
        (out, lse), rows = self.results, pl.ds(row, ROWS)
        lse[self.head, rows] = softmax.log_sum(highest, sums)
        result = total * along(softmax.inverse(sums), total.shape, 0)
        memory = self.memory.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        target = head_of(out, self.head).at[rows]
        store([tcgen05.rearranged(memory, result)], self.memory.staged.at[mine], target)

    def step(
        self, mine: Any, factor: Any, bounds: Bounds, row: Any, t: Any, i: Any, carry: Any
    ) -> Any:
        """Add one block of keys, the `i`-th of the ring."""
        m = self.memory
        (total, before, sums), slot = carry, lax.rem(i, self.stages)
        ready, done = m.ready.at[mine], m.done.at[mine]
        scores = m.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        weights = m.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]

        def seen(x, otherwise, part):
            if not self.bounded():
                return x
            return tcgen05.where_seen(bounds, row, t * BLOCK + part.start, x, otherwise)

        def scales(ring, part):
            return along(load(ring.at[slot, part], BY_COLUMN), (ROWS, part.size), 1)

        def logits(part):
            x = tcgen05.read(scores.at[:, part]) * scales(m.k_scale_ring, part)
            return seen(x, -jnp.inf, part)

        def largest_scale(part, largest):
            x = seen(scales(m.v_scale_ring, part), 0.0, part)
            return jnp.maximum(largest, jnp.max(x, axis=1))

        plgpu.barrier_wait(m.full.at[slot])
        smallest = filled(softmax.SMALLEST_UNIT, (ROWS,), BY_ROW)
        unit = tcgen05.by_parts(BLOCK, largest_scale, smallest)
        tcgen05.multiply(ready, done, (scores, m.queries.at[mine], m.key_ring.at[slot]))
        largest = lambda part, x: jnp.maximum(x, jnp.max(logits(part), axis=1))
        largest = tcgen05.by_parts(BLOCK, largest, filled(-jnp.inf, (ROWS,), BY_ROW))
        highest, shift, shrink = softmax.raised(before, largest, factor, unit)

        def weigh(part, added):
            p = softmax.probabilities(logits(part), factor, shift)
            tcgen05.write(weights.at[:, part], p * scales(m.v_scale_ring, part))
            return added + jnp.sum(p, axis=1)

        sums = sums * shrink + tcgen05.by_parts(BLOCK, weigh, filled(0.0, (ROWS,), BY_ROW)) * unit
        plgpu.commit_tmem()

        products = m.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]  # in place of the scores
        tcgen05.multiply(ready, done, (products, weights, m.value_ring.at[slot]))
        release(m.empty.at[slot])
        total = total * along(shrink, total.shape, 0)
        return tcgen05.added(total, products, unit), highest, sums
