"""The gradients of attention by its keys and values, on Blackwell: a kernel over tiles of keys.

A block takes 128 keys, and goes over the blocks of 64 queries that see one of these, of all heads
that share the keys. Scores are transposed, so that a sum over queries is over columns. One
warpgroup makes the probabilities and dV, another one dS and dK::

    s  = k . q^T                                            dp = v . dO^T
    p  = exp2(s k_scale_j q_factor_i - lse_i)      -- p ->  dS = p (dp v_scale_j dO_scale_i - dot_i)
    w  = e4m3fn(p u_i)                                      w  = cast(dS q2_scale_i / r_j)
    dV = dV + (w . dO2) b 2^-8                              dK = dK + (w . q2) r_j

with p = 0 where invisible, ``u_i = dO2_scale_i / b 2^8``, `b` the largest of the block, and
``r_j = max_i |dS q2_scale_i| / fmt.max``, a power of two. `q2` and `dO2` are queries and gradients
as these products take them. p goes from one warpgroup to the other through tensor memory, in one of
two places by turns. Keys that are padding get numbers, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell.attention_dq import Problem
from jfp8.kernels.blackwell.attention_parts import (
    BY_COLUMN,
    BY_ELEMENT,
    BY_ROW,
    ROWS,
    added,
    by_parts,
    multiply,
    of_rows,
    ordered,
    read,
    rearranged,
    release,
    staging,
    where_seen,
    write,
)
from jfp8.kernels.hopper.attention_parts import (
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

QUERIES = 64  # of a step
TURNS = 2  # places for probabilities


def scratch(
    p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The memory of a block, named like the attributes of `_Block`."""
    stage = 4 * QUERIES * p.size + 6 * QUERIES * 4
    free = SHARED_MEMORY - ROWS * (2 * p.size + COMPUTE * 128) - 1024
    stages = min(4, free // stage)
    f32 = lambda columns: plgpu.TMEM((ROWS, columns), jnp.float32)
    f8 = lambda dtype: plgpu.TMEM((ROWS, QUERIES), dtype, packed=True)
    return {
        "keys": tile((ROWS, p.size), operands["k"].dtype),
        "values": tile((ROWS, p.size), operands["v"].dtype),
        "query_ring": tile((stages, QUERIES, p.size), operands["q"].dtype),
        "grad_ring": tile((stages, QUERIES, p.size), operands["grad"].dtype),
        "q_t_ring": tile((stages, p.size, QUERIES), operands["q_t"].dtype),
        "grad_t_ring": tile((stages, p.size, QUERIES), operands["grad_t"].dtype),
        "vector_ring": plgpu.SMEM((stages, 6, QUERIES), jnp.float32),
        "staged": staging(out_dtype),
        "probabilities": f32(TURNS * QUERIES),
        "dp": f32(QUERIES),
        "of_dv": f32(p.size),
        "of_dk": f32(p.size),
        "weights": f8(jnp.float8_e4m3fn),
        "scores": f8(p.formats[1].dtype),
        "copied": plgpu.Barrier(num_barriers=COMPUTE),
        "ready": ordered(),
        "done": ordered(),
        "made": plgpu.Barrier(num_barriers=TURNS, orders_tensor_core=True),
        "used": plgpu.Barrier(num_barriers=TURNS, orders_tensor_core=True),
        "empty": freed(stages),
        "full": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
    }


def kernel(p: Problem, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """One block, from its start to its end. All arguments but the first two are references."""
    *operands, dk, dv = refs
    given = dict(zip(names, operands, strict=True))
    # The first keys of a head first: with causal masks they take longest.
    head, tile_of_head = place(dk, given["k"].shape[1] // ROWS)
    block = _Block(p, given, dk, dv, head, tile_of_head * ROWS, **shared)
    work = block.make_dv, block.make_dk, block.copy
    lax.switch(lax.axis_index("warpgroup"), work)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The work of a block's warpgroups. References: in device, shared and tensor memory."""

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
    staged: Any
    probabilities: Any
    dp: Any
    of_dv: Any
    of_dk: Any
    weights: Any
    scores: Any
    copied: Any
    ready: Any
    done: Any
    made: Any
    used: Any
    empty: Any
    full: Any

    def bounds(self) -> Bounds:
        """Which queries see a key: as `Bounds` says of keys and queries, the other way round."""
        return Bounds(self.p.right, self.p.left, self.p.rows)

    def steps(self) -> tuple[jax.Array, jax.Array]:
        """The first block of queries, and how many: of each head that shares the keys."""
        first, _, _, end = self.bounds().blocks(self.row, ROWS, QUERIES)
        return first, end - first

    def count(self) -> jax.Array:
        """How many steps there are."""
        _, count = self.steps()
        return count * self.p.groups

    def at(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The head of queries and the block of the `i`-th step."""
        first, count = self.steps()
        return self.key_head * self.p.groups + lax.div(i, count), first + lax.rem(i, count)

    def copy(self) -> None:
        """The warpgroup that fills the ring."""

        def copy(i, slot):
            head, block = self.at(i)
            rows, full = pl.ds(block * QUERIES, QUERIES), self.full.at[slot]
            for name, ring in (("q", self.query_ring), ("grad", self.grad_ring)):
                plgpu.copy_gmem_to_smem(self.given[name].at[head, rows], ring.at[slot], full)
            for name, ring in (
                ("q_t", self.q_t_ring),
                ("grad_t", self.grad_t_ring),
                ("by_query", self.vector_ring),
            ):
                plgpu.copy_gmem_to_smem(self.given[name].at[head, :, rows], ring.at[slot], full)

        fill(self.count(), self.full.shape[0], self.empty, copy)

    def make_dv(self) -> None:
        """The warpgroup of the probabilities."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        k_scale = self.own("k", self.keys, 0)
        bounds, masked = self.bounds(), self.p.left is not None or self.p.right is not None

        def step(i, total):
            (head, t), slot = self.at(i), lax.rem(i, self.full.shape[0])
            probabilities, turn = self.turn(i)
            plgpu.barrier_wait(self.full.at[slot])

            @pl.when(i >= TURNS)
            def _():
                plgpu.barrier_wait(self.used.at[turn])

            self.multiply(0, probabilities, self.keys, self.query_ring.at[slot])

            def weigh(part, carry):
                vector = self.vectors(slot, part)
                x = read(probabilities.at[:, part])
                p = jnp.exp2(x * along(k_scale, x.shape, 0) * vector(0) - vector(1))
                if masked:
                    p = where_seen(bounds, self.row, t * QUERIES + part.start, p, 0.0)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(probabilities.at[:, part], p)
                write(self.weights.at[:, part], p * vector(4))
                return carry

            by_parts(QUERIES, weigh, jnp.int32(0))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(self.made.at[turn])
            self.multiply(0, self.of_dv, self.weights, self.grad_t_ring.at[slot])
            release(self.empty.at[slot])
            return added(total, self.of_dv, of_rows(1.0) * self.given["unit"][head, t])

        total = self.loop(step)

        # A block must not end before all have arrived at its barriers.
        @pl.loop(jnp.maximum(self.count() - TURNS, 0), self.count())
        def _(i):
            plgpu.barrier_wait(self.used.at[lax.rem(i, TURNS)])

        self.store(0, self.of_dv, total, self.dv)

    def make_dk(self) -> None:
        """The warpgroup of the gradients of the scores."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        v_scale = self.own("v", self.values, 1)

        def step(i, total):
            slot = lax.rem(i, self.full.shape[0])
            probabilities, turn = self.turn(i)
            plgpu.barrier_wait(self.full.at[slot])
            self.multiply(1, self.dp, self.values, self.grad_ring.at[slot])
            plgpu.barrier_wait(self.made.at[turn])

            def differentiate(part, largest):
                vector = self.vectors(slot, part)
                dp = read(self.dp.at[:, part]) * along(v_scale, (ROWS, part.size), 0)
                x = read(probabilities.at[:, part]) * (dp * vector(2) - vector(3)) * vector(5)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(self.dp.at[:, part], x)
                return jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))

            largest = by_parts(QUERIES, differentiate, of_rows(0.0))
            plgpu.barrier_arrive(self.used.at[turn])
            plgpu.commit_tmem()
            scale, inverse = scale_and_inverse(largest, self.p.formats[1], "power_of_two")

            def rounded(part, carry):
                x = read(self.dp.at[:, part])
                write(self.scores.at[:, part], x * along(inverse, x.shape, 0))
                return carry

            by_parts(QUERIES, rounded, jnp.int32(0))
            plgpu.commit_tmem()
            self.multiply(1, self.of_dk, self.scores, self.q_t_ring.at[slot])
            release(self.empty.at[slot])
            return added(total, self.of_dk, scale)

        self.store(1, self.of_dk, self.loop(step) * self.p.scale, self.dk)

    # What both do

    def own(self, name: str, to: Any, n: int) -> jax.Array:
        """Copies the block's keys or values, and returns their scales."""
        rows = pl.ds(self.row, ROWS)
        plgpu.copy_gmem_to_smem(self.given[name].at[self.key_head, rows], to, self.copied.at[n])
        scales = load(self.given["by_key"].at[self.key_head, n, rows], BY_ROW)
        plgpu.barrier_wait(self.copied.at[n])
        return scales

    def turn(self, i: jax.Array) -> tuple[Any, jax.Array]:
        """Where the probabilities of the `i`-th step are."""
        turn = lax.rem(i, TURNS)
        return self.probabilities.at[:, pl.ds(turn * QUERIES, QUERIES)], turn

    def vectors(self, slot: Any, part: Any) -> Any:
        """The `n`-th numbers of a part of the queries, for all keys, as a function of `n`."""

        def vector(n: int) -> jax.Array:
            return along(load(self.vector_ring.at[slot, n, part], BY_COLUMN), (ROWS, part.size), 1)

        return vector

    def multiply(self, n: int, total: Any, a: Any, b: Any) -> None:
        multiply(self.ready.at[n], self.done.at[n], (total, a, b))

    def loop(self, step: Any) -> jax.Array:
        """The sum after all steps."""
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.p.size), jnp.float32), BY_ELEMENT)
        return lax.fori_loop(0, self.count(), step, zeros)

    def store(self, n: int, memory: Any, total: jax.Array, to: Any) -> None:
        target = head_of(to, self.key_head).at[pl.ds(self.row, ROWS)]
        store([rearranged(memory, total)], self.staged.at[n], target)
