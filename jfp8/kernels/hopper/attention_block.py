"""Attention of f8 matrices on Hopper's tensor cores: both products, and the softmax between them.

A block of three warpgroups computes 128 rows of the output. One warpgroup only copies: keys and
values of 128 tokens at a time, with their scales, into a ring of shared memory. The other two take
64 queries each, and go over the blocks of keys that one of these queries sees::

    copies        0 | 1 | 2 | (0 has been used) 3 | ...
    warpgroup 0   q.k  softmax      p.v  q.k  softmax      p.v  q.k ...
    warpgroup 1        q.k      softmax  p.v  q.k      softmax  p.v ...

The softmax is "online": its maximum and its sum are those of the keys so far, and earlier sums are
multiplied by a factor when the maximum grows. No ``[T, S]`` array is in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper import mask_bits
from jfp8.kernels.hopper.attention_parts import (
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    COMPUTE,
    COMPUTE_REGISTERS,
    ROWS,
    along,
    fill,
    freed,
    head_of,
    in_batch,
    load,
    multiply,
    of_rows,
    place,
    staging,
    store,
    tile,
    zeros,
)
from jfp8.kernels.hopper.key_ranges import Bounds, Mask
from jfp8.kernels.hopper.tiles import SHARED_MEMORY

LIFT = 8  # probabilities, at most 1, are multiplied by 2^8 to be cast to e4m3fn
SMALLEST_SCALE = np.float32(2.0**-90)  # of a block of values: probabilities are divided by it
PART = 64  # keys whose scales are in registers at the same time
PARTS: list[Any] = [pl.ds(c, PART) for c in range(0, BLOCK, PART)]


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
      stages: of the ring.
    """

    rows: int
    keys: int
    size: int
    groups: int
    factor: float
    left: int | None
    right: int | None
    stages: int

    @property
    def tiles(self) -> int:
        """Blocks of warpgroups that a head takes."""
        return self.rows // (COMPUTE * ROWS)

    @property
    def parts(self) -> list[Any]:
        """The columns of the output, in parts whose sums fit the registers beside all of it."""
        width = min(self.size, 128)
        return [pl.ds(c, width) for c in range(0, self.size, width)]


def most_stages(size: int, *, with_mask: bool) -> int:
    """As many as fit beside queries, probabilities, staged stores and barriers."""
    stage = 2 * BLOCK * size + 2 * BLOCK * 4 + mask_bits.stage_bytes(BLOCK, with_mask=with_mask)
    free = SHARED_MEMORY - COMPUTE * ROWS * (size + BLOCK + 2 * 128) - 1024
    return min(4, free // stage)


def scratch(
    p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The shared memory of a block, named like the attributes of `_Block`."""
    return {
        "queries": tile((COMPUTE, ROWS, p.size), operands["q"].dtype),
        "key_ring": tile((p.stages, BLOCK, p.size), operands["k"].dtype),
        "value_ring": tile((p.stages, p.size, BLOCK), operands["v_t"].dtype),
        "k_scale_ring": plgpu.SMEM((p.stages, BLOCK), jnp.float32),
        "v_scale_ring": plgpu.SMEM((p.stages, BLOCK), jnp.float32),
        "weights": tile((COMPUTE, ROWS, BLOCK), jnp.float8_e4m3fn),
        "staged": staging(2, out_dtype),
        "copied": plgpu.Barrier(num_barriers=COMPUTE),
        "empty": freed(p.stages),
        "full": plgpu.Barrier(num_arrivals=4 + ("bits" in operands), num_barriers=p.stages),
        **mask_bits.ring(p.stages, BLOCK, operands),
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
    """The work of a block's warpgroups. References: in device memory, then in shared memory."""

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
    weights: Any
    staged: Any
    copied: Any
    empty: Any
    full: Any
    bits_ring: Any = None

    def bounds(self) -> Bounds:
        """Which keys the queries of this block's head see."""
        length = self.p.keys
        if "key_lengths" in self.given:
            length = jnp.clip(self.given["key_lengths"][self.key_head], 0, length)
        return Bounds(self.p.left, self.p.right, length)

    def steps(self, bounds: Bounds) -> tuple[jax.Array, jax.Array]:
        """The blocks of keys that go through the ring: those that any query of this block sees."""
        first, _, _, end = bounds.blocks(self.row, COMPUTE * ROWS, BLOCK)
        return mask_bits.span(self.given, *self.tile(), first, end)

    def tile(self) -> tuple[Any, Any]:
        """The batch and head of this block, and which of its tiles."""
        return in_batch(self.out, self.head), lax.div(self.row, COMPUTE * ROWS)

    # The warpgroup that fills the ring

    def copy(self) -> None:
        first, end = self.steps(self.bounds())

        def copy(i, slot):
            keys, full = pl.ds((first + i) * BLOCK, BLOCK), self.full.at[slot]
            of_head = {n: self.given[n].at[self.key_head] for n in _OF_KEYS}
            plgpu.copy_gmem_to_smem(of_head["k"].at[keys], self.key_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["v_t"].at[:, keys], self.value_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["k_scale"].at[keys], self.k_scale_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["v_scale"].at[keys], self.v_scale_ring.at[slot], full)
            if "bits" in self.given:
                bits = mask_bits.of_block(self.given["bits"], *self.tile(), first + i, BLOCK)
                plgpu.copy_gmem_to_smem(bits, self.bits_ring.at[slot], full)

        fill(end - first, self.p.stages, self.empty, copy)

    # The warpgroups that multiply

    def attend(self) -> None:
        """One half of the block's rows."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = self.mine()
        row = self.row + mine * ROWS
        queries = self.given["q"].at[self.head, pl.ds(row, ROWS)]
        plgpu.copy_gmem_to_smem(queries, self.queries.at[mine], self.copied.at[mine])
        factor = load(self.given["q_scale"].at[self.head, pl.ds(row, ROWS)], BY_ROW)
        # That of a query of zeros may underflow, and zero times the -inf of a hidden key is NaN.
        factor = jnp.maximum(factor * self.p.factor, np.finfo(np.float32).tiny)
        plgpu.barrier_wait(self.copied.at[mine])

        totals = [zeros(part.size) for part in self.p.parts]
        carry = totals, of_rows(-jnp.inf), of_rows(0.0)
        bounds = self.bounds()
        start, stop = self.steps(bounds)
        _, first_full, end_full, _ = bounds.blocks(row, ROWS, BLOCK)

        def step(t, carry):
            sees_all = (t >= first_full) & (t < end_full) if self.bounded() else None
            slot = lax.rem(t - start, self.p.stages)
            words = mask_bits.of_rows(self.bits_ring, slot, mine)
            mask = Mask(bounds, row, t * BLOCK, sees_all, branch=self.p.size <= 128, words=words)
            return self.step(factor, mask, slot, carry)

        self.store(row, *lax.fori_loop(start, stop, step, carry))

    def mine(self) -> jax.Array:
        """Which half is this warpgroup's."""
        return lax.axis_index("warpgroup")

    def bounded(self) -> bool:
        """Whether bounds may hide a part of a block from some query."""
        bounded = self.p.left is not None or self.p.right is not None
        return bounded or "key_lengths" in self.given or self.p.keys % BLOCK != 0

    def step(self, factor: jax.Array, mask: Mask, slot: jax.Array, carry: Any) -> Any:
        """One block of keys."""
        (total, highest, sums), mine = carry, self.mine()
        plgpu.barrier_wait(self.full.at[slot])
        unit = self.unit(slot, mask)

        (s,) = multiply((self.queries.at[mine], self.key_ring.at[slot]))
        s = [s[:, part.start : part.start + part.size] for part in PARTS]
        scales = [load(self.k_scale_ring.at[slot, part], BY_COLUMN) for part in PARTS]
        s = [x * along(scale, x.shape, 1) for x, scale in zip(s, scales, strict=True)]
        hide = lambda x, part: mask.where(x, -jnp.inf, part.start)
        s = mask.choose(lambda s: s, lambda s: list(map(hide, s, PARTS)), s)

        # Softmax. The subtracted maximum is smaller by LIFT, which lifts probabilities at no cost,
        # and divides them by the scale of the values. That of a row that has seen no key is -inf.
        before = highest
        highest = jnp.max(functools.reduce(jnp.maximum, s), axis=1) * factor - np.float32(LIFT)
        highest = jnp.maximum(before, highest)
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        shrink = jnp.exp2(before - shift)
        shift = shift + _log2(unit)
        added, weights = [], []
        for part, x in zip(PARTS, s, strict=True):
            p = jnp.exp2(x * along(factor, x.shape, 0) - along(shift, x.shape, 0))
            added.append(jnp.sum(p, axis=1))
            p = p * along(load(self.v_scale_ring.at[slot, part], BY_COLUMN), p.shape, 1)
            weights.append(p.astype(self.weights.dtype))
        sums = sums * shrink + functools.reduce(jnp.add, added) * unit
        self.weights[mine] = jnp.concatenate(weights, 1)
        plgpu.commit_smem()  # and all warps have read the slot's scales, before it is freed

        for n, part in enumerate(self.p.parts):
            values = self.value_ring.at[slot, part]
            (added,) = multiply((self.weights.at[mine], values))
            added = added * along(unit, added.shape, 0)
            total[n] = total[n] * along(shrink, added.shape, 0) + added
        plgpu.barrier_arrive(self.empty.at[slot])
        return total, highest, sums

    def unit(self, slot: jax.Array, mask: Mask) -> jax.Array:
        """The largest scale of the values that each query sees: f32[ROWS]."""
        scales = lambda part: load(self.v_scale_ring.at[slot, part], BY_COLUMN)

        def all_seen():
            largest = jnp.max(functools.reduce(jnp.maximum, map(scales, PARTS)))
            return plgpu.layout_cast(jnp.full((ROWS,), largest), BY_ROW)

        def some_seen():
            seen = lambda part: mask.where(along(scales(part), (ROWS, PART), 1), 0.0, part.start)
            return jnp.max(functools.reduce(jnp.maximum, map(seen, PARTS)), axis=1)

        return jnp.maximum(mask.choose(all_seen, some_seen), SMALLEST_SCALE)

    def store(self, row: jax.Array, total: list[jax.Array], highest: Any, sums: Any) -> None:
        """The output, rounded, and the logarithm of the softmax's denominator."""
        rows = pl.ds(row, ROWS)
        self.lse[self.head, rows] = highest * np.float32(math.log(2)) + jnp.log(sums)
        inverse = 1.0 / jnp.where(sums == 0, 1.0, sums)
        parts = [x * along(inverse, x.shape, 0) for x in total]
        store(parts, self.staged.at[self.mine()], head_of(self.out, self.head).at[rows])


def _log2(x: jax.Array) -> jax.Array:
    """Of powers of two that are normal, exactly."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) - 127).astype(jnp.float32)


_OF_KEYS = ("k", "v_t", "k_scale", "v_scale")
