"""Differentiate attention with respect to keys and values, on Hopper's tensor cores.

Two warpgroups take 64 keys each, and loop over the blocks of 64 queries that see one of these, of
all heads that share the keys. See `KeyTile` for the equations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.key_tile import KeyTile
from jfp8.kernels.flash.problem import QUERIES, Problem
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.hopper.hidden_keys import Mask, masks_of
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS, cut, multiply, slices
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, tile

PARTS = slices(QUERIES, 16)


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
            for x, part in zip(cut(s, PARTS), PARTS, strict=True)
        ]
        p = mask.hide(p, 0.0, PARTS)
        made = [x * by_query(4, x, part) for x, part in zip(p, PARTS, strict=True)]
        weights[...] = jnp.concatenate(made, 1).astype(weights.dtype)

        def differentiate(x, y, part):
            y = x * (y * by_row(1, x) * by_query(2, x, part) - by_query(3, x, part))
            return y * by_query(5, x, part)

        ds = jnp.concatenate(list(map(differentiate, p, cut(dp, PARTS), PARTS)), 1)
        largest = jnp.max(jnp.abs(ds), axis=1)
        scale, inverse = scale_and_inverse(largest, self.p.formats[1], "power_of_two")
        scores[...] = (ds * along(inverse, ds.shape, 0)).astype(scores.dtype)
        plgpu.commit_smem()
        (added,) = multiply((weights, m.grad_t_ring.at[slot]))
        dv = dv + added * unit
        (added,) = multiply((scores, m.q_t_ring.at[slot]))
        release(m.empty.at[slot])
        return dk + added * along(scale, added.shape, 0), dv
