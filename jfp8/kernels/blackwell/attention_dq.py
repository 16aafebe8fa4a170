"""Differentiate attention with respect to queries, on Blackwell's tensor cores.

Two warpgroups take 128 queries each, and loop over the blocks of 128 keys that one of these sees.
See `BackwardTile` for the equations. Tensor memory has room for dP of half the keys; dS replaces
the scores, and the matmul's result replaces dS.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell import tcgen05
from jfp8.kernels.blackwell.tcgen05 import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS
from jfp8.kernels.flash.problem import BLOCK, Bounds, Problem
from jfp8.kernels.flash.query_tile import BackwardTile
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release

HALF = BLOCK // 2


@dataclasses.dataclass(frozen=True)
class QueryGradientByTcgen05(BackwardTile):
    """Compute dQ of a tile of queries, and the largest ``|dS|`` of each."""

    name = "attention_dq_blackwell"
    tokens = COMPUTE * ROWS

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {
            "scores": tcgen05.sums(BLOCK),
            "half": tcgen05.sums(HALF),
            "weights": tcgen05.factors(BLOCK, p.formats[0].dtype),
            "ready": tcgen05.ordered(),
            "done": tcgen05.ordered(),
        }

    def attend(self) -> None:
        mine, row, of_row = self.begin(BY_ROW)
        bounds = self.bounds()
        start, stop = self.steps(bounds)

        def step(t, carry):
            return self.step(mine, of_row, bounds, row, t, t - start, carry)

        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT), filled(0.0, (ROWS,), BY_ROW)
        total, found = lax.fori_loop(start, stop, step, zeros)
        (dq, largest), rows = self.results, pl.ds(row, ROWS)
        largest[self.head, rows] = found
        memory = self.memory.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        result = tcgen05.rearranged(memory, total * self.p.scale)
        store([result], self.memory.staged.at[mine], head_of(dq, self.head).at[rows])

    def step(
        self, mine: Any, of_row: list[Any], bounds: Bounds, row: Any, t: Any, i: Any, carry: Any
    ) -> Any:
        """Add one block of keys, number `t` of all, the `i`-th of the ring."""
        m = self.memory
        (total, largest), slot = carry, lax.rem(i, self.stages)
        ready, done = m.ready.at[mine], m.done.at[mine]
        scores = m.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        half = m.half.at[:, pl.ds(mine * HALF, HALF)]
        weights = m.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]
        plgpu.barrier_wait(m.full.at[slot])

        def differentiate(first, part, carry):
            largest, largest_scaled = carry
            keys = pl.ds(first + part.start, part.size)
            vector = lambda n: load(m.scale_ring.at[slot, n, keys], BY_COLUMN)
            by_key = lambda n: along(vector(n), (ROWS, part.size), 1)
            by_row = lambda n: along(of_row[n], (ROWS, part.size), 0)
            p = jnp.exp2(tcgen05.read(scores.at[:, keys]) * by_key(0) * by_row(0) - by_row(1))
            if self.bounded():
                p = tcgen05.where_seen(bounds, row, t * BLOCK + keys.start, p, 0.0)
            x = p * (tcgen05.read(half.at[:, part]) * by_key(1) * by_row(2) - by_row(3))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(scores.at[:, keys], x)
            return largest, jnp.maximum(largest_scaled, jnp.max(jnp.abs(x), axis=1))

        found = largest, filled(0.0, (ROWS,), BY_ROW)
        for first in (0, HALF):
            values = m.value_ring.at[slot, pl.ds(first, HALF)]
            products = [(half, m.grads.at[mine], values)]
            if first == 0:
                products += [(scores, m.queries.at[mine], m.key_ring.at[slot])]
            tcgen05.multiply(ready, done, *products)
            found = tcgen05.by_parts(HALF, functools.partial(differentiate, first), found)
        largest, largest_scaled = found
        plgpu.commit_tmem()
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")
        tcgen05.write_all(weights, scores, inverse)
        products = m.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        tcgen05.multiply(ready, done, (products, weights, m.k_t_ring.at[slot]))
        release(m.empty.at[slot])
        return tcgen05.added(total, products, scale), largest
