"""Attention of f8 matrices on Blackwell's tensor cores: both products, and the softmax between.

A block of three warpgroups computes 256 rows of the output. One warpgroup only copies, into a ring
of shared memory; the other two take 128 queries each, and go over the blocks of 128 keys that one
of these queries sees. Each starts its own products, so that one multiplies while the other is at
its softmax. In tensor memory, a warpgroup has the scores, then in their place ``w . v``, and beside
them the weights `w` in f8, from where the tensor cores read them. Sums over blocks are in
registers: ``w . v`` of each block has a scale of its own.

The softmax is "online": its maximum and its sum are those of the keys so far, and earlier sums are
multiplied by a factor when the maximum grows. No ``[T, S]`` array is in memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell.attention_parts import (
    BY_COLUMN,
    BY_ELEMENT,
    BY_ROW,
    ROWS,
    added,
    by_parts,
    factors,
    multiply,
    of_rows,
    ordered,
    read,
    rearranged,
    release,
    staging,
    sums,
    where_seen,
    write,
)
from jfp8.kernels.hopper.attention_parts import (
    BLOCK,
    COMPUTE,
    COMPUTE_REGISTERS,
    along,
    fill,
    freed,
    head_of,
    load,
    place,
    store,
    tile,
)
from jfp8.kernels.hopper.key_ranges import Bounds
from jfp8.kernels.hopper.tiles import SHARED_MEMORY

LIFT = 8  # probabilities, at most 1, are multiplied by 2^8 to be cast to e4m3fn
SMALLEST_SCALE = 2.0**-90  # of a block of values: probabilities are divided by it


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for.

    Attributes:
      rows: queries of a head, padded.
      keys: keys of a head, not padded.
      size: of a head.
      groups: see `attention_forward`.
      factor: what logits in base 2 are multiplied by.
      left, right: bounds of the window; None: none.
    """

    rows: int
    keys: int
    size: int
    groups: int
    factor: float
    left: int | None
    right: int | None

    @property
    def tiles(self) -> int:
        """Blocks of warpgroups that a head takes."""
        return self.rows // (COMPUTE * ROWS)


def scratch(
    p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The memory of a block, named like the attributes of `_Block`."""
    stage = 2 * BLOCK * p.size + 2 * BLOCK * 4
    free = SHARED_MEMORY - COMPUTE * ROWS * (p.size + 128) - 1024
    stages = min(4, free // stage)
    return {
        "queries": tile((COMPUTE, ROWS, p.size), operands["q"].dtype),
        "key_ring": tile((stages, BLOCK, p.size), operands["k"].dtype),
        "value_ring": tile((stages, p.size, BLOCK), operands["v_t"].dtype),
        "k_scale_ring": plgpu.SMEM((stages, BLOCK), jnp.float32),
        "v_scale_ring": plgpu.SMEM((stages, BLOCK), jnp.float32),
        "staged": staging(out_dtype),
        "scores": sums(BLOCK),
        "weights": factors(BLOCK, jnp.float8_e4m3fn),
        "copied": plgpu.Barrier(num_barriers=COMPUTE),
        "ready": ordered(),
        "done": ordered(),
        "empty": freed(stages),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
    }


def kernel(p: Problem, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """One block, from its start to its end. All arguments but the first two are references."""
    *operands, out, lse = refs
    head, tile_of_head = place(out, p.tiles)
    # The last rows of a head first: with `is_causal` they take longest.
    row = (p.tiles - 1 - tile_of_head) * (COMPUTE * ROWS)
    given = dict(zip(names, operands, strict=True))
    block = _Block(p, given, out, lse, head, lax.div(head, p.groups), row, **shared)
    lax.cond(lax.axis_index("warpgroup") < COMPUTE, block.attend, block.copy)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The work of a block's warpgroups. References: in device, shared and tensor memory."""

    p: Problem
    given: dict[str, Any]
    out: Any
    lse: Any
    head: jax.Array
    key_head: jax.Array
    row: jax.Array
    queries: Any
    key_ring: Any
    value_ring: Any
    k_scale_ring: Any
    v_scale_ring: Any
    staged: Any
    scores: Any
    weights: Any
    copied: Any
    ready: Any
    done: Any
    empty: Any
    full: Any

    def bounds(self) -> Bounds:
        """Which keys the queries of this block's head see."""
        length = self.p.keys
        if "key_lengths" in self.given:
            length = jnp.clip(self.given["key_lengths"][self.key_head], 0, length)
        return Bounds(self.p.left, self.p.right, length)

    def steps(self, bounds: Bounds) -> tuple[jax.Array, jax.Array]:
        """The blocks of keys that go through the ring: those that any query of this block sees."""
        first, _, _, end = bounds.blocks(self.row, COMPUTE * ROWS, BLOCK)
        return first, end

    def copy(self) -> None:
        """The warpgroup that fills the ring."""
        first, end = self.steps(self.bounds())

        def copy(i, slot):
            keys, full = pl.ds((first + i) * BLOCK, BLOCK), self.full.at[slot]
            of_head = lambda name: self.given[name].at[self.key_head]
            plgpu.copy_gmem_to_smem(of_head("k").at[keys], self.key_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("v_t").at[:, keys], self.value_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("k_scale").at[keys], self.k_scale_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("v_scale").at[keys], self.v_scale_ring.at[slot], full)

        fill(end - first, self.full.shape[0], self.empty, copy)

    def attend(self) -> None:
        """One half of the block's rows."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.axis_index("warpgroup")
        row = self.row + mine * ROWS
        rows = pl.ds(row, ROWS)
        queries = self.given["q"].at[self.head, rows]
        plgpu.copy_gmem_to_smem(queries, self.queries.at[mine], self.copied.at[mine])
        factor = load(self.given["q_scale"].at[self.head, rows], BY_ROW) * self.p.factor
        # That of a query of zeros may underflow, and zero times the -inf of a hidden key is NaN.
        factor = jnp.maximum(factor, np.finfo(np.float32).tiny)
        plgpu.barrier_wait(self.copied.at[mine])

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.p.size), jnp.float32), BY_ELEMENT)
        bounds = self.bounds()
        start, stop = self.steps(bounds)

        def step(t, carry):
            return self.step(mine, factor, bounds, row, t, t - start, carry)

        carry = zeros, of_rows(-jnp.inf), of_rows(0.0)
        total, highest, sums = lax.fori_loop(start, stop, step, carry)
        self.lse[self.head, rows] = highest * np.float32(math.log(2)) + jnp.log(sums)
        inverse = 1.0 / jnp.where(sums == 0, 1.0, sums)
        target = head_of(self.out, self.head).at[rows]
        result = total * along(inverse, total.shape, 0)
        memory = self.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        store([rearranged(memory, result)], self.staged.at[mine], target)

    def masked(self) -> bool:
        """Whether some query may see a part of a block."""
        bounded = self.p.left is not None or self.p.right is not None
        return bounded or "key_lengths" in self.given or self.p.keys % BLOCK != 0

    def step(self, mine: Any, factor: Any, bounds: Bounds, row: Any, t: Any, i: Any, carry: Any):
        """One block of keys, the `i`-th of the ring."""
        (total, before, sums), slot = carry, lax.rem(i, self.full.shape[0])
        ready, done = self.ready.at[mine], self.done.at[mine]
        scores = self.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        weights = self.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]

        def seen(x, otherwise, part):
            if not self.masked():
                return x
            return where_seen(bounds, row, t * BLOCK + part.start, x, otherwise)

        def scales(ring, part):
            return along(load(ring.at[slot, part], BY_COLUMN), (ROWS, part.size), 1)

        def logits(part):
            x = read(scores.at[:, part]) * scales(self.k_scale_ring, part)
            return seen(x, -jnp.inf, part)

        def largest_scale(part, largest):
            x = seen(scales(self.v_scale_ring, part), 0.0, part)
            return jnp.maximum(largest, jnp.max(x, axis=1))

        plgpu.barrier_wait(self.full.at[slot])
        unit = by_parts(BLOCK, largest_scale, of_rows(SMALLEST_SCALE))
        multiply(ready, done, (scores, self.queries.at[mine], self.key_ring.at[slot]))
        largest = lambda part, x: jnp.maximum(x, jnp.max(logits(part), axis=1))
        highest = by_parts(BLOCK, largest, of_rows(-jnp.inf))
        # The subtracted maximum is smaller by LIFT, which lifts probabilities at no cost, and
        # divides them by the scale of the values. That of a row that has seen no key is -inf.
        highest = jnp.maximum(before, highest * factor - np.float32(LIFT))
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        shrink = jnp.exp2(before - shift)
        shift = shift + _log2(unit)

        def weigh(part, added):
            x = logits(part)
            p = jnp.exp2(x * along(factor, x.shape, 0) - along(shift, x.shape, 0))
            write(weights.at[:, part], p * scales(self.v_scale_ring, part))
            return added + jnp.sum(p, axis=1)

        sums = sums * shrink + by_parts(BLOCK, weigh, of_rows(0.0)) * unit
        plgpu.commit_tmem()

        products = self.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]  # in place of the scores
        multiply(ready, done, (products, weights, self.value_ring.at[slot]))
        release(self.empty.at[slot])
        total = total * along(shrink, total.shape, 0)
        return added(total, products, unit), highest, sums


def _log2(x: jax.Array) -> jax.Array:
    """Of powers of two that are normal, exactly."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) - 127).astype(jnp.float32)
