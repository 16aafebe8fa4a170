"""Loop over blocks of keys for a tile of queries, and over blocks of queries for a tile of keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.flash.problem import BLOCK, QUERIES, Bounds, Problem
from jfp8.kernels.flash.ring import fill, in_batch, place
from jfp8.kernels.flash.tile_work import TileWork
from jfp8.kernels.shared_memory import along, load


@dataclasses.dataclass(frozen=True)
class QueryTile(TileWork):
    """Describe the task for a tile of queries; its results are a matrix and a vector."""

    like = "q"
    width = BLOCK

    @classmethod
    def place(cls, p: Problem, result: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        head, n = place(result, cls.tokens)
        # The last rows of a head come first: with `is_causal` they take longest.
        row = (p.rows // cls.tokens - 1 - n) * cls.tokens
        return head, row, lax.div(head, p.groups)

    def bounds(self) -> Bounds:
        """Return the keys that the queries of this head see."""
        length = self.p.keys
        if "key_lengths" in self.given:
            length = jnp.clip(self.given["key_lengths"][self.key_head], 0, length)
        return Bounds(self.p.left, self.p.right, length)

    def bounded(self) -> bool:
        """Return True if bounds may hide part of a block from some query."""
        return self.p.windowed or "key_lengths" in self.given or self.p.keys % BLOCK != 0

    def steps(self, bounds: Bounds) -> tuple[jax.Array, jax.Array]:
        """Return the blocks of keys that go through the ring: all that a query of the tile sees."""
        first, _, _, end = bounds.blocks(self.row, self.tokens, BLOCK)
        return self.seen_blocks(first, end)

    def copy(self) -> None:
        first, end = self.steps(self.bounds())

        def copy(i, slot):
            self.bring(self.key_head, first + i, slot)
            if "bits" in self.given:
                self.bring_bits(in_batch(self.results[0], self.head), first + i, slot)

        fill(end - first, self.stages, self.memory.empty, copy)


class ForwardTile(QueryTile):
    """Describe the task of the forward pass: its results are `o` and `lse`. ::

        s   = (q . k^T) * q_scale_i * (scale * log2(e)) * k_scale_j    -inf where invisible
        m'  = max(m, rowmax(s));  p = exp2(s - m');  a = exp2(m - m')
        l   = l * a + rowsum(p)
        b_i = max(v_scale_j)  over the block's keys j that are visible to i
        w   = e4m3fn(p * v_scale_j / b_i * 2^8)
        acc = acc * a + (w . v^T) * (b_i * 2^-8)

    for each block of keys in order; then ``o = acc / l`` and ``lse = m * ln 2 + ln l``. All of
    it is f32, except for the f8 matmuls of the tensor cores.
    """

    takes = {"q": "queries"}
    rings = {
        "k": "key_ring",
        "v_t": "value_ring",
        "k_scale": "k_scale_ring",
        "v_scale": "v_scale_ring",
    }

    def begin(self, by_row: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Take queries; return the index of the half, its first row, and factors in `by_row`."""
        q_scale, in_base_2 = self.given["q_scale"].at[self.head], self.p.scale * math.log2(math.e)
        # A query of zeros may have a factor of 0, and 0 times the -inf of a hidden key is NaN.
        tiny = np.finfo(np.float32).tiny
        factor = lambda rows: jnp.maximum(load(q_scale.at[rows], by_row) * in_base_2, tiny)
        return self.take(factor)


class BackwardTile(QueryTile):
    """Describe the task of the backward pass: its results are dQ and the largest ``|dS|``. ::

        s  = q . k^T                         dp = dO . v^T
        p  = exp2(s k_scale_j q_factor_i - lse_i)               0 where invisible
        dS = p (dp v_scale_j dO_scale_i - dot_i)
        w  = cast(dS k2_scale_j / r_i)       r_i = max_j |dS k2_scale_j| / fmt.max, a power of two
        dQ = dQ + (w . k2) r_i

    for each block of keys in order; `k2` are the keys in the layout of this matmul. The scores
    are recomputed: no ``[T, S]`` array is stored in memory.
    """

    takes = {"q": "queries", "grad": "grads"}
    rings = {"k": "key_ring", "v": "value_ring", "k_t": "k_t_ring", "by_key": "scale_ring"}

    def begin(self, by_row: Any) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Take queries and gradients; return the same with all numbers of the rows."""
        by_query = self.given["by_query"].at[self.head]
        of_rows = lambda rows: [load(by_query.at[n, rows], by_row) for n in range(4)]
        return self.take(of_rows)


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
    of these matmuls. The loop covers the queries of all heads that share the keys, head by head.
    Scores are transposed, so that a sum over queries is over columns. Padded keys get values, too:
    masking them would cost registers that are not available.
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


# The softmax of the forward pass. Its maximum and its sum cover the keys so far: when the maximum
# grows, earlier sums are rescaled. Probabilities become weights in f8: in a block they are divided
# by the largest scale of its values, the unit of a row, by which their sums are multiplied.

LIFT = 8  # probabilities, at most 1, are multiplied by 2^8 to be cast to e4m3fn
SMALLEST_UNIT = 2.0**-90  # since probabilities are divided by it


def raised(
    before: jax.Array, largest: jax.Array, factor: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the maximum of all keys so far, the shift of a block's logits, and the shrinkage.

    `before` is the maximum of earlier blocks, `largest` the maximum of this block's scores, and
    `unit` the largest scale of its values.
    """
    # The subtracted maximum is smaller by LIFT, which scales probabilities at no cost, and divides
    # them by the unit. For a row that has seen no key it is -inf.
    highest = jnp.maximum(before, largest * factor - np.float32(LIFT))
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    shrink = jnp.exp2(before - shift)
    # The unit is a normal power of two, the logarithm of which is exact.
    log_unit = (lax.bitcast_convert_type(unit, jnp.int32) >> 23) - 127
    return highest, shift + log_unit.astype(jnp.float32), shrink


def probabilities(x: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """Return the probabilities of scores, lifted and divided by the unit of their row."""
    return jnp.exp2(x * along(factor, x.shape, 0) - along(shift, x.shape, 0))


def ended(highest: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logarithm of the denominator, from the last maximum and sum, and its reciprocal.

    The reciprocal is arbitrary for a row without keys.
    """
    log_sum = highest * np.float32(math.log(2)) + jnp.log(sums)
    return log_sum, 1.0 / jnp.where(sums == 0, 1.0, sums)
