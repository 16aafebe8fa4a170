"""Differentiate attention with respect to queries, on Hopper's tensor cores.

Two warpgroups take 64 queries each, and loop over the blocks of 128 keys that one of these sees.
See `BackwardTile` for the equations.
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

from jfp8.kernels.flash.problem import BLOCK, Problem
from jfp8.kernels.flash.query_tile import BackwardTile
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.hopper.hidden_keys import Mask, masks_of
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS, cut, multiply, slices
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, tile

PARTS = slices(BLOCK, 64)


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
            for x, part in zip(cut(s, PARTS), PARTS, strict=True)
        ]
        p = mask.hide(p, 0.0, PARTS)

        made, largest_scaled = [], []
        for x, y, part in zip(p, cut(dp, PARTS), PARTS, strict=True):
            x = x * (y * by_key(1, x, part) * by_row(2, x) - by_row(3, x))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2, x, part)
            largest_scaled.append(jnp.max(jnp.abs(x), axis=1))
            made.append(x)
        largest_scaled = functools.reduce(jnp.maximum, largest_scaled)
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")
        made = [(x * along(inverse, x.shape, 0)).astype(weights.dtype) for x in made]
        weights[...] = jnp.concatenate(made, 1)
        plgpu.commit_smem()
        (added,) = multiply((weights, m.k_t_ring.at[slot]))
        release(m.empty.at[slot])
        return total + added * along(scale, added.shape, 0), largest
