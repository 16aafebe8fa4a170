"""The gradient of attention by its queries, on Hopper's tensor cores: a kernel over tiles of them.

Two warpgroups take 64 queries each, and go over the blocks of 128 keys that one of these sees::

    s  = q . k^T                         dp = dO . v^T
    p  = exp2(s q_factor_i k_scale_j - lse_i)               0 where invisible
    dS = p (dp dO_scale_i v_scale_j - dot_i)
    w  = cast(dS k2_scale_j / r_i)       r_i = max_j |dS k2_scale_j| / fmt.max, a power of two
    dQ = dQ + (w . k2) r_i

`k2` are the keys as this product takes them. The scores are computed anew: no ``[T, S]`` array is
in memory.
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
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.scaling.formats import Format

PART = 64  # keys whose scales are in registers at the same time
PARTS: list[Any] = [pl.ds(c, PART) for c in range(0, BLOCK, PART)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the kernels of the backward pass are compiled for.

    Attributes:
      rows: queries of a head, padded.
      keys: keys of a head, not padded.
      size: of a head.
      groups, left, right: see `attention_block.Problem`.
      scale: of the logits.
      formats: of dS in dQ and in dK.
    """

    rows: int
    keys: int
    size: int
    groups: int
    left: int | None
    right: int | None
    scale: float
    formats: tuple[Format, Format]

    @property
    def tiles(self) -> int:
        """Blocks of warpgroups that a head of queries takes."""
        return self.rows // (COMPUTE * ROWS)


def scratch(
    p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The shared memory of a block, named like the attributes of `_Block`."""
    with_mask = "bits" in operands
    stage = 3 * BLOCK * (p.size + 4) + mask_bits.stage_bytes(BLOCK, with_mask=with_mask)
    free = SHARED_MEMORY - COMPUTE * ROWS * (2 * p.size + BLOCK + 128) - 1024
    stages = min(4, free // stage)
    return {
        "queries": tile((COMPUTE, ROWS, p.size), operands["q"].dtype),
        "grads": tile((COMPUTE, ROWS, p.size), operands["grad"].dtype),
        "key_ring": tile((stages, BLOCK, p.size), operands["k"].dtype),
        "value_ring": tile((stages, BLOCK, p.size), operands["v"].dtype),
        "k_t_ring": tile((stages, p.size, BLOCK), operands["k_t"].dtype),
        "scale_ring": plgpu.SMEM((stages, 3, BLOCK), jnp.float32),
        "weights": tile((COMPUTE, ROWS, BLOCK), p.formats[0].dtype),
        "staged": staging(1, out_dtype),
        "copied": plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
        "empty": freed(stages),
        "full": plgpu.Barrier(num_arrivals=4 + with_mask, num_barriers=stages),
        **mask_bits.ring(stages, BLOCK, operands),
    }


def kernel(p: Problem, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """One block, from its start to its end. All arguments but the first two are references."""
    *operands, dq, largest = refs
    head, tile_of_head = place(dq, p.tiles)
    # The last rows of a head first: with causal masks they take longest.
    row = (p.tiles - 1 - tile_of_head) * (COMPUTE * ROWS)
    given = dict(zip(names, operands, strict=True))
    block = _Block(p, given, dq, largest, head, lax.div(head, p.groups), row, **shared)
    lax.cond(lax.axis_index("warpgroup") < COMPUTE, block.attend, block.copy)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The work of a block's warpgroups. References: in device memory, then in shared memory."""

    p: Problem
    given: dict[str, Any]
    dq: Any
    largest: Any
    head: jax.Array
    key_head: jax.Array
    row: jax.Array
    queries: Any
    grads: Any
    key_ring: Any
    value_ring: Any
    k_t_ring: Any
    scale_ring: Any
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

    def steps(self, bounds: Bounds) -> tuple[Any, Any]:
        """The blocks of keys that go through the ring: those that any query of this block sees."""
        first, _, _, end = bounds.blocks(self.row, COMPUTE * ROWS, BLOCK)
        return mask_bits.span(self.given, *self.tile(), first, end)

    def tile(self) -> tuple[Any, Any]:
        """The batch and head of this block, and which of its tiles."""
        return in_batch(self.dq, self.head), lax.div(self.row, COMPUTE * ROWS)

    def bounded(self) -> bool:
        """Whether bounds may hide a part of a block from some query."""
        bounded = self.p.left is not None or self.p.right is not None
        return bounded or "key_lengths" in self.given or self.p.keys % BLOCK != 0

    def copy(self) -> None:
        """The warpgroup that fills the ring."""
        first, end = self.steps(self.bounds())

        def copy(i, slot):
            keys, full = pl.ds((first + i) * BLOCK, BLOCK), self.full.at[slot]
            of_head = {n: x.at[self.key_head] for n, x in self.given.items() if n in _OF_KEYS}
            plgpu.copy_gmem_to_smem(of_head["k"].at[keys], self.key_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["v"].at[keys], self.value_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["k_t"].at[:, keys], self.k_t_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head["by_key"].at[:, keys], self.scale_ring.at[slot], full)
            if "bits" in self.given:
                bits = mask_bits.of_block(self.given["bits"], *self.tile(), first + i, BLOCK)
                plgpu.copy_gmem_to_smem(bits, self.bits_ring.at[slot], full)

        fill(end - first, self.full.shape[0], self.empty, copy)

    def attend(self) -> None:
        """One half of the block's rows."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.axis_index("warpgroup")
        row = self.row + mine * ROWS
        rows = pl.ds(row, ROWS)
        for name, to in (("q", self.queries), ("grad", self.grads)):
            source = self.given[name].at[self.head, rows]
            plgpu.copy_gmem_to_smem(source, to.at[mine], self.copied.at[mine])
        by_query = self.given["by_query"].at[self.head]
        of_row = [load(by_query.at[n, rows], BY_ROW) for n in range(4)]
        plgpu.barrier_wait(self.copied.at[mine])
        bounds = self.bounds()
        start, stop = self.steps(bounds)
        _, first_full, end_full, _ = bounds.blocks(row, ROWS, BLOCK)

        def step(t, carry):
            sees_all = (t >= first_full) & (t < end_full) if self.bounded() else None
            slot = lax.rem(t - start, self.full.shape[0])
            words = mask_bits.of_rows(self.bits_ring, slot, mine)
            mask = Mask(bounds, row, t * BLOCK, sees_all, branch=False, words=words)
            return self.step(mine, of_row, mask, slot, carry)

        total, largest = lax.fori_loop(start, stop, step, (zeros(self.p.size), of_rows(0.0)))
        self.largest[self.head, rows] = largest
        target = head_of(self.dq, self.head).at[rows]
        store([total * self.p.scale], self.staged.at[mine], target)

    def step(self, mine: Any, of_row: list[jax.Array], mask: Mask, slot: Any, carry: Any) -> Any:
        """One block of keys."""
        total, largest = carry
        plgpu.barrier_wait(self.full.at[slot])
        s, dp = multiply(
            (self.queries.at[mine], self.key_ring.at[slot]),
            (self.grads.at[mine], self.value_ring.at[slot]),
        )
        by_row = lambda n, x: along(of_row[n], x.shape, 0)
        vector = lambda n, part: load(self.scale_ring.at[slot, n, part], BY_COLUMN)
        by_key = lambda n, x, part: along(vector(n, part), x.shape, 1)

        def probabilities(x, part):
            x = x[:, part.start : part.start + part.size]
            return jnp.exp2(x * by_key(0, x, part) * by_row(0, x) - by_row(1, x))

        p = [probabilities(s, part) for part in PARTS]
        hide = lambda x, part: mask.where(x, 0.0, part.start)
        p = mask.choose(lambda p: p, lambda p: list(map(hide, p, PARTS)), p)

        made, largest_scaled = [], []
        for x, part in zip(p, PARTS, strict=True):
            y = dp[:, part.start : part.start + part.size]
            x = x * (y * by_key(1, x, part) * by_row(2, x) - by_row(3, x))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2, x, part)
            largest_scaled.append(jnp.max(jnp.abs(x), axis=1))
            made.append(x)
        largest_scaled = functools.reduce(jnp.maximum, largest_scaled)
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")
        made = [(x * along(inverse, x.shape, 0)).astype(self.weights.dtype) for x in made]
        self.weights[mine] = jnp.concatenate(made, 1)
        plgpu.commit_smem()  # and all warps have read the slot's scales, before it is freed
        (added,) = multiply((self.weights.at[mine], self.k_t_ring.at[slot]))
        plgpu.barrier_arrive(self.empty.at[slot])
        return total + added * along(scale, added.shape, 0), largest


_OF_KEYS = ("k", "v", "k_t", "by_key")
