"""The gradient of attention by its queries, on Blackwell's tensor cores: a kernel over their tiles.

Two warpgroups take 128 queries each, and go over the blocks of 128 keys that one of these sees::

    s  = q . k^T                         dp = dO . v^T
    p  = exp2(s k_scale_j q_factor_i - lse_i)               0 where invisible
    dS = p (dp v_scale_j dO_scale_i - dot_i)
    w  = cast(dS k2_scale_j / r_i)       r_i = max_j |dS k2_scale_j| / fmt.max, a power of two
    dQ = dQ + (w . k2) r_i

`k2` are the keys as this product takes them. The scores are computed anew: no ``[T, S]`` array is
in memory. Tensor memory has room for dP of half the keys; dS takes the place of the scores, and
the product that of dS.
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
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.scaling.formats import Format

HALF = BLOCK // 2


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
    """The memory of a block, named like the attributes of `_Block`."""
    stage = 3 * BLOCK * p.size + 3 * BLOCK * 4
    free = SHARED_MEMORY - COMPUTE * ROWS * (2 * p.size + 128) - 1024
    stages = min(4, free // stage)
    return {
        "queries": tile((COMPUTE, ROWS, p.size), operands["q"].dtype),
        "grads": tile((COMPUTE, ROWS, p.size), operands["grad"].dtype),
        "key_ring": tile((stages, BLOCK, p.size), operands["k"].dtype),
        "value_ring": tile((stages, BLOCK, p.size), operands["v"].dtype),
        "k_t_ring": tile((stages, p.size, BLOCK), operands["k_t"].dtype),
        "scale_ring": plgpu.SMEM((stages, 3, BLOCK), jnp.float32),
        "staged": staging(out_dtype),
        "scores": sums(BLOCK),
        "half": sums(HALF),
        "weights": factors(BLOCK, p.formats[0].dtype),
        "copied": plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
        "ready": ordered(),
        "done": ordered(),
        "empty": freed(stages),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
    }


def kernel(p: Problem, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """One block, from its start to its end. All arguments but the first two are references."""
    *operands, dq, largest = refs
    head, tile_of_head = place(dq, p.tiles)
    # The last rows of a head first: with `is_causal` they take longest.
    row = (p.tiles - 1 - tile_of_head) * (COMPUTE * ROWS)
    given = dict(zip(names, operands, strict=True))
    block = _Block(p, given, dq, largest, head, lax.div(head, p.groups), row, **shared)
    lax.cond(lax.axis_index("warpgroup") < COMPUTE, block.attend, block.copy)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The work of a block's warpgroups. References: in device, shared and tensor memory."""

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
    staged: Any
    scores: Any
    half: Any
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

    def masked(self) -> bool:
        """Whether some query may see a part of a block."""
        bounded = self.p.left is not None or self.p.right is not None
        return bounded or "key_lengths" in self.given or self.p.keys % BLOCK != 0

    def copy(self) -> None:
        """The warpgroup that fills the ring."""
        first, _, _, end = self.bounds().blocks(self.row, COMPUTE * ROWS, BLOCK)

        def copy(i, slot):
            keys, full = pl.ds((first + i) * BLOCK, BLOCK), self.full.at[slot]
            of_head = lambda name: self.given[name].at[self.key_head]
            plgpu.copy_gmem_to_smem(of_head("k").at[keys], self.key_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("v").at[keys], self.value_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("k_t").at[:, keys], self.k_t_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(of_head("by_key").at[:, keys], self.scale_ring.at[slot], full)

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
        start, _, _, stop = bounds.blocks(self.row, COMPUTE * ROWS, BLOCK)

        def step(t, carry):
            return self.step(mine, of_row, bounds, row, t, t - start, carry)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.p.size), jnp.float32), BY_ELEMENT)
        total, largest = lax.fori_loop(start, stop, step, (zeros, of_rows(0.0)))
        self.largest[self.head, rows] = largest
        memory = self.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        result = rearranged(memory, total * self.p.scale)
        store([result], self.staged.at[mine], head_of(self.dq, self.head).at[rows])

    def step(
        self, mine: Any, of_row: list[Any], bounds: Bounds, row: Any, t: Any, i: Any, carry: Any
    ) -> Any:
        """One block of keys, number `t` of all, the `i`-th of the ring."""
        (total, largest), slot = carry, lax.rem(i, self.full.shape[0])
        ready, done = self.ready.at[mine], self.done.at[mine]
        scores = self.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        half = self.half.at[:, pl.ds(mine * HALF, HALF)]
        weights = self.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]
        plgpu.barrier_wait(self.full.at[slot])

        def differentiate(first, part, carry):
            largest, largest_scaled = carry
            keys = pl.ds(first + part.start, part.size)
            vector = lambda n: load(self.scale_ring.at[slot, n, keys], BY_COLUMN)
            by_key = lambda n: along(vector(n), (ROWS, part.size), 1)
            by_row = lambda n: along(of_row[n], (ROWS, part.size), 0)
            p = jnp.exp2(read(scores.at[:, keys]) * by_key(0) * by_row(0) - by_row(1))
            if self.masked():
                p = where_seen(bounds, row, t * BLOCK + keys.start, p, 0.0)
            x = p * (read(half.at[:, part]) * by_key(1) * by_row(2) - by_row(3))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(scores.at[:, keys], x)
            return largest, jnp.maximum(largest_scaled, jnp.max(jnp.abs(x), axis=1))

        found = largest, of_rows(0.0)
        for first in (0, HALF):
            values = self.value_ring.at[slot, pl.ds(first, HALF)]
            products = [(half, self.grads.at[mine], values)]
            if first == 0:
                products += [(scores, self.queries.at[mine], self.key_ring.at[slot])]
            multiply(ready, done, *products)
            found = by_parts(HALF, functools.partial(differentiate, first), found)
        largest, largest_scaled = found
        plgpu.commit_tmem()
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")

        def rounded(part, carry):
            x = read(scores.at[:, part])
            write(weights.at[:, part], x * along(inverse, x.shape, 0))
            return carry

        by_parts(BLOCK, rounded, jnp.int32(0))
        plgpu.commit_tmem()
        products = self.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        multiply(ready, done, (products, weights, self.k_t_ring.at[slot]))
        release(self.empty.at[slot])
        return added(total, products, scale), largest
