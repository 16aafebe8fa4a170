"""The gradients of attention by its keys and values, on Hopper: a kernel over tiles of keys.

Two warpgroups take 64 keys each, and go over the blocks of 64 queries that see one of these, of all
heads that share the keys. Scores are transposed, so that a sum over queries is over columns::

    s  = k . q^T                         dp = v . dO^T
    p  = exp2(s k_scale_j q_factor_i - lse_i)               0 where invisible
    w  = e4m3fn(p u_i)                   u_i = dO2_scale_i / b 2^8,  b the largest of the block
    dV = dV + (w . dO2) b 2^-8
    dS = p (dp v_scale_j dO_scale_i - dot_i)
    w  = cast(dS q2_scale_i / r_j)       r_j = max_i |dS q2_scale_i| / fmt.max, a power of two
    dK = dK + (w . q2) r_j

`q2` and `dO2` are queries and gradients as these products take them. Keys that are padding get
numbers, too: lengths would cost registers that there are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper import mask_bits
from jfp8.kernels.hopper.attention_dq import Problem
from jfp8.kernels.hopper.attention_parts import (
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
    place,
    staging,
    store,
    tile,
    zeros,
)
from jfp8.kernels.hopper.key_ranges import Bounds, Mask
from jfp8.kernels.hopper.tiles import SHARED_MEMORY
from jfp8.kernels.scales_in_kernels import scale_and_inverse

QUERIES = 64  # of a step
PART = 16  # queries whose vectors are in registers at the same time
PARTS: list[Any] = [pl.ds(c, PART) for c in range(0, QUERIES, PART)]


def scratch(
    p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The shared memory of a block, named like the attributes of `_Block`."""
    with_mask = "bits" in operands
    stage = QUERIES * (4 * p.size + 6 * 4) + mask_bits.stage_bytes(QUERIES, with_mask=with_mask)
    free = SHARED_MEMORY - COMPUTE * ROWS * (2 * p.size + 2 * QUERIES + 128) - 1024
    stages = min(4, free // stage)
    return {
        "keys": tile((COMPUTE, ROWS, p.size), operands["k"].dtype),
        "values": tile((COMPUTE, ROWS, p.size), operands["v"].dtype),
        "query_ring": tile((stages, QUERIES, p.size), operands["q"].dtype),
        "grad_ring": tile((stages, QUERIES, p.size), operands["grad"].dtype),
        "q_t_ring": tile((stages, p.size, QUERIES), operands["q_t"].dtype),
        "grad_t_ring": tile((stages, p.size, QUERIES), operands["grad_t"].dtype),
        "vector_ring": plgpu.SMEM((stages, 6, QUERIES), jnp.float32),
        "weights": tile((COMPUTE, ROWS, QUERIES), jnp.float8_e4m3fn),
        "scores": tile((COMPUTE, ROWS, QUERIES), p.formats[1].dtype),
        "staged": staging(1, out_dtype),
        "copied": plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
        "empty": freed(stages),
        "full": plgpu.Barrier(num_arrivals=5 + with_mask, num_barriers=stages),
        **mask_bits.ring(stages, QUERIES, operands),
    }


def kernel(p: Problem, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """One block, from its start to its end. All arguments but the first two are references."""
    *operands, dk, dv = refs
    given = dict(zip(names, operands, strict=True))
    # The first keys of a head first: with causal masks they take longest.
    head, tile_of_head = place(dk, given["k"].shape[1] // (COMPUTE * ROWS))
    block = _Block(p, given, dk, dv, head, tile_of_head * (COMPUTE * ROWS), **shared)
    lax.cond(lax.axis_index("warpgroup") < COMPUTE, block.attend, block.copy)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The work of a block's warpgroups. References: in device memory, then in shared memory."""

    p: Problem
    given: dict[str, Any]
    dk: Any
    dv: Any
    key_head: jax.Array
    row: jax.Array
    keys: Any
    values: Any
    query_ring: Any
    grad_ring: Any
    q_t_ring: Any
    grad_t_ring: Any
    vector_ring: Any
    weights: Any
    scores: Any
    staged: Any
    copied: Any
    empty: Any
    full: Any
    bits_ring: Any = None

    def bounds(self) -> Bounds:
        """Which queries see a key: as `Bounds` says of keys and queries, the other way round."""
        return Bounds(self.p.right, self.p.left, self.p.rows)

    def steps(self) -> tuple[jax.Array, jax.Array]:
        """The first block of queries, and how many: of each head that shares the keys."""
        first, _, _, end = self.bounds().blocks(self.row, COMPUTE * ROWS, QUERIES)
        head, tile = in_batch(self.dk, self.key_head), lax.div(self.row, COMPUTE * ROWS)
        first, end = mask_bits.span(self.given, head, tile, first, end)
        return first, end - first

    def at(self, i: jax.Array, steps: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        """The head of queries and the block of the `i`-th step."""
        first, count = steps
        return self.key_head * self.p.groups + lax.div(i, count), first + lax.rem(i, count)

    def copy_bits(self, head: Any, block: Any, slot: Any) -> None:
        """Those of a block of queries of one head to the ring."""
        batch, own = in_batch(self.dk, self.key_head)
        n = head - (self.key_head - own) * self.p.groups
        tile = lax.div(self.row, COMPUTE * ROWS)
        bits = mask_bits.of_block(self.given["bits"], (batch, n), tile, block, QUERIES)
        plgpu.copy_gmem_to_smem(bits, self.bits_ring.at[slot], self.full.at[slot])

    def copy(self) -> None:
        """The warpgroup that fills the ring."""
        steps = self.steps()

        def copy(i, slot):
            head, block = self.at(i, steps)
            rows, full = pl.ds(block * QUERIES, QUERIES), self.full.at[slot]
            for name, ring in (("q", self.query_ring), ("grad", self.grad_ring)):
                plgpu.copy_gmem_to_smem(self.given[name].at[head, rows], ring.at[slot], full)
            for name, ring in (
                ("q_t", self.q_t_ring),
                ("grad_t", self.grad_t_ring),
                ("by_query", self.vector_ring),
            ):
                plgpu.copy_gmem_to_smem(self.given[name].at[head, :, rows], ring.at[slot], full)
            if "bits" in self.given:
                self.copy_bits(head, block, slot)

        fill(steps[1] * self.p.groups, self.full.shape[0], self.empty, copy)

    def attend(self) -> None:
        """One half of the block's keys."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.axis_index("warpgroup")
        row = self.row + mine * ROWS
        rows = pl.ds(row, ROWS)
        for name, to in (("k", self.keys), ("v", self.values)):
            source = self.given[name].at[self.key_head, rows]
            plgpu.copy_gmem_to_smem(source, to.at[mine], self.copied.at[mine])
        by_key = self.given["by_key"].at[self.key_head]
        of_row = [load(by_key.at[n, rows], BY_ROW) for n in range(2)]
        plgpu.barrier_wait(self.copied.at[mine])
        bounds, steps = self.bounds(), self.steps()
        _, first_full, end_full, _ = bounds.blocks(row, ROWS, QUERIES)
        bounded = self.p.left is not None or self.p.right is not None
        one_sided = self.p.left is None or self.p.right is None

        def step(i, carry):
            head, t = self.at(i, steps)
            slot = lax.rem(i, self.full.shape[0])
            sees_all = (t >= first_full) & (t < end_full) if bounded else None
            words = mask_bits.of_rows(self.bits_ring, slot, mine)
            mask = Mask(bounds, row, t * QUERIES, sees_all, branch=one_sided, words=words)
            unit = self.given["unit"][head, t]
            return self.step(mine, of_row, mask, unit, slot, carry)

        start = zeros(self.p.size), zeros(self.p.size)
        dk, dv = lax.fori_loop(0, steps[1] * self.p.groups, step, start)
        for x, to in ((dk * self.p.scale, self.dk), (dv, self.dv)):
            store([x], self.staged.at[mine], head_of(to, self.key_head).at[rows])

    def step(
        self, mine: Any, of_row: list[jax.Array], mask: Mask, unit: Any, slot: Any, carry: Any
    ) -> Any:
        """One block of queries."""
        dk, dv = carry
        plgpu.barrier_wait(self.full.at[slot])
        s, dp = multiply(
            (self.keys.at[mine], self.query_ring.at[slot]),
            (self.values.at[mine], self.grad_ring.at[slot]),
        )
        by_row = lambda n, x: along(of_row[n], x.shape, 0)
        vector = lambda n, part: load(self.vector_ring.at[slot, n, part], BY_COLUMN)
        by_query = lambda n, x, part: along(vector(n, part), x.shape, 1)

        def probabilities(x, part):
            x = x[:, part.start : part.start + part.size]
            return jnp.exp2(x * by_row(0, x) * by_query(0, x, part) - by_query(1, x, part))

        p = [probabilities(s, part) for part in PARTS]
        hide = lambda x, part: mask.where(x, 0.0, part.start)
        p = mask.choose(lambda p: p, lambda p: list(map(hide, p, PARTS)), p)
        weights = [x * by_query(4, x, part) for x, part in zip(p, PARTS, strict=True)]
        self.weights[mine] = jnp.concatenate(weights, 1).astype(self.weights.dtype)

        def scores(x, part):
            y = dp[:, part.start : part.start + part.size]
            y = x * (y * by_row(1, x) * by_query(2, x, part) - by_query(3, x, part))
            return y * by_query(5, x, part)

        ds = jnp.concatenate(list(map(scores, p, PARTS)), 1)
        largest = jnp.max(jnp.abs(ds), axis=1)
        scale, inverse = scale_and_inverse(largest, self.p.formats[1], "power_of_two")
        self.scores[mine] = (ds * along(inverse, ds.shape, 0)).astype(self.scores.dtype)
        plgpu.commit_smem()  # and all warps have read the slot's vectors, before it is freed
        (added,) = multiply((self.weights.at[mine], self.grad_t_ring.at[slot]))
        dv = dv + added * unit
        (added,) = multiply((self.scores.at[mine], self.q_t_ring.at[slot]))
        plgpu.barrier_arrive(self.empty.at[slot])
        return dk + added * along(scale, added.shape, 0), dv
