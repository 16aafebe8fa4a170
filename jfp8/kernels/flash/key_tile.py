"""Loop over blocks of queries for a tile of keys, to compute dK and dV.

The loop covers the queries of all heads that share the keys, head by head. Scores are
transposed, so that a sum over queries is over columns. Padded keys get values, too:
masking them would cost registers that are not available.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from jfp8.kernels.flash.problem import QUERIES, Bounds, Problem
from jfp8.kernels.flash.ring import fill, in_batch, place
from jfp8.kernels.flash.tile_work import TileWork


@dataclasses.dataclass(frozen=True)
class KeyTile(TileWork):
    """Describe the work on a tile of keys; its results are dK and dV. ::

        s  = k . q^T                         dp = v . dO^T
        p  = exp2(s k_scale_j q_factor_i - lse_i)               0 where invisible
        w  = e4m3fn(p u_i)                   u_i = dO2_scale_i / b 2^8,  b the largest of the block
        dV = dV + (w . dO2) b 2^-8
        dS = p (dp v_scale_j dO_scale_i - dot_i)
        w  = cast(dS q2_scale_i / r_j)       r_j = max_i |dS q2_scale_i| / fmt.max, a power of two
        dK = dK + (w . q2) r_j

    for each block of queries in order; `q2` and `dO2` are the queries and gradients in the layout
    of these matmuls.
    """

    like = "k"
    width = QUERIES
    takes = {"k": "keys", "v": "values"}
    rings = {
        "q": "query_ring",
        "grad": "grad_ring",
        "q_t": "q_t_ring",
        "grad_t": "grad_t_ring",
        "by_query": "vector_ring",
    }

    @classmethod
    def place(cls, p: Problem, result: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        # The first keys of a head come first: with causal masks they take longest.
        head, n = place(result, cls.tokens)
        return head, n * cls.tokens, head

    def bounds(self) -> Bounds:
        """Return the queries that see a key: bounds with keys and queries exchanged."""
        return Bounds(self.p.right, self.p.left, self.p.rows)

    def steps(self) -> tuple[jax.Array, jax.Array]:
        """Return the first block of queries and their number, for each head that shares keys."""
        first, _, _, end = self.bounds().blocks(self.row, self.tokens, QUERIES)
        first, end = self.seen_blocks(first, end)
        return first, end - first

    def count(self, steps: tuple[Any, Any]) -> jax.Array:
        return steps[1] * self.p.groups

    def at(self, i: jax.Array, steps: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        """Return the head of queries and the block of the `i`-th step."""
        first, count = steps
        return self.head * self.p.groups + lax.div(i, count), first + lax.rem(i, count)

    def copy(self) -> None:
        steps = self.steps()

        def copy(i, slot):
            head, block = self.at(i, steps)
            self.bring(head, block, slot)
            if "bits" in self.given:
                batch, own = in_batch(self.results[0], self.head)
                self.bring_bits((batch, head - (self.head - own) * self.p.groups), block, slot)

        fill(self.count(steps), self.stages, self.memory.empty, copy)
