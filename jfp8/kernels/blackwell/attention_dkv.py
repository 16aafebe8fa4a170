"""Differentiate attention with respect to keys and values, on Blackwell's tensor cores.

A block takes 128 keys, and loops over the blocks of 64 queries that see one of these, of all heads
that share the keys; see `KeyTile` for the equations. One warpgroup computes probabilities and dV,
the other dS and dK. Probabilities pass from one to the other through tensor memory, alternating
between two buffers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell import tcgen05
from jfp8.kernels.blackwell.tcgen05 import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS
from jfp8.kernels.flash.key_tile import KeyTile
from jfp8.kernels.flash.problem import QUERIES, Problem
from jfp8.kernels.flash.ring import head_of, store
from jfp8.kernels.flash.tile_work import COMPUTE_REGISTERS
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, staging, tile

TURNS = 2  # buffers for probabilities


@dataclasses.dataclass(frozen=True)
class KeyGradientsByTcgen05(KeyTile):
    """Compute dK and dV of a tile of keys."""

    name = "attention_dkv_blackwell"

    @classmethod
    def kept(
        cls, p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
    ) -> dict[str, Any]:
        # Both warpgroups take all rows: one the keys, the other the values.
        return {
            "keys": tile((ROWS, p.size), operands["k"].dtype),
            "values": tile((ROWS, p.size), operands["v"].dtype),
            "staged": staging(ROWS, out_dtype),
            "copied": plgpu.Barrier(num_barriers=COMPUTE),
        }

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        f32 = lambda columns: plgpu.TMEM((ROWS, columns), jnp.float32)
        f8 = lambda dtype: plgpu.TMEM((ROWS, QUERIES), dtype, packed=True)
        return {
            "probabilities": f32(TURNS * QUERIES),
            "dp": f32(QUERIES),
            "of_dv": f32(p.size),
            "of_dk": f32(p.size),
            "weights": f8(jnp.float8_e4m3fn),
            "scores": f8(p.formats[1].dtype),
            "ready": tcgen05.ordered(),
            "done": tcgen05.ordered(),
            "made": plgpu.Barrier(num_barriers=TURNS, orders_tensor_core=True),
            "used": plgpu.Barrier(num_barriers=TURNS, orders_tensor_core=True),
        }

    def run(self) -> None:
        lax.switch(lax.axis_index("warpgroup"), (self.make_dv, self.make_dk, self.copy))

    def make_dv(self) -> None:
        """Compute the probabilities and dV: the task of one warpgroup."""
        m = self.memory
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        k_scale = self.own("k", m.keys, 0)
        bounds, steps = self.bounds(), self.steps()

        def step(i, total):
            (head, t), slot = self.at(i, steps), lax.rem(i, self.stages)
            probabilities, turn = self.turn(i)
            plgpu.barrier_wait(m.full.at[slot])

            @pl.when(i >= TURNS)
            def _():
                plgpu.barrier_wait(m.used.at[turn])

            self.multiply(0, probabilities, m.keys, m.query_ring.at[slot])

            def weigh(part, carry):
                vector = self.vectors(slot, part)
                x = tcgen05.read(probabilities.at[:, part])
                p = jnp.exp2(x * along(k_scale, x.shape, 0) * vector(0) - vector(1))
                if self.p.windowed:
                    p = tcgen05.where_seen(bounds, self.row, t * QUERIES + part.start, p, 0.0)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(probabilities.at[:, part], p)
                tcgen05.write(m.weights.at[:, part], p * vector(4))
                return carry

            tcgen05.by_parts(QUERIES, weigh, jnp.int32(0))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(m.made.at[turn])
            self.multiply(0, m.of_dv, m.weights, m.grad_t_ring.at[slot])
            release(m.empty.at[slot])
            unit = filled(1.0, (ROWS,), BY_ROW) * self.given["unit"][head, t]
            return tcgen05.added(total, m.of_dv, unit)

        count = self.count(steps)
        total = self.loop(count, step)

        # A block must not end before all threads have arrived at its barriers.
        @pl.loop(jnp.maximum(count - TURNS, 0), count)
        def _(i):
            plgpu.barrier_wait(m.used.at[lax.rem(i, TURNS)])

        self.store(0, m.of_dv, total)

    def make_dk(self) -> None:
        """Compute the gradients of the scores and dK: the task of the other warpgroup."""
        m = self.memory
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        v_scale = self.own("v", m.values, 1)

        def step(i, total):
            slot = lax.rem(i, self.stages)
            probabilities, turn = self.turn(i)
            plgpu.barrier_wait(m.full.at[slot])
            self.multiply(1, m.dp, m.values, m.grad_ring.at[slot])
            plgpu.barrier_wait(m.made.at[turn])

            def differentiate(part, largest):
                vector = self.vectors(slot, part)
                dp = tcgen05.read(m.dp.at[:, part]) * along(v_scale, (ROWS, part.size), 0)
                x = tcgen05.read(probabilities.at[:, part]) * (dp * vector(2) - vector(3))
                x = x * vector(5)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(m.dp.at[:, part], x)
                return jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))

            largest = tcgen05.by_parts(QUERIES, differentiate, filled(0.0, (ROWS,), BY_ROW))
            plgpu.barrier_arrive(m.used.at[turn])
            plgpu.commit_tmem()
            scale, inverse = scale_and_inverse(largest, self.p.formats[1], "power_of_two")
            tcgen05.write_all(m.scores, m.dp, inverse)
            self.multiply(1, m.of_dk, m.scores, m.q_t_ring.at[slot])
            release(m.empty.at[slot])
            return tcgen05.added(total, m.of_dk, scale)

        total = self.loop(self.count(self.steps()), step)
        self.store(1, m.of_dk, total * self.p.scale)

    # Tasks of both warpgroups

    def own(self, name: str, to: Any, n: int) -> jax.Array:
        """Copy the tile's keys or values, and return their scales."""
        rows = pl.ds(self.row, ROWS)
        plgpu.copy_gmem_to_smem(self.given[name].at[self.head, rows], to, self.memory.copied.at[n])
        scales = load(self.given["by_key"].at[self.head, n, rows], BY_ROW)
        plgpu.barrier_wait(self.memory.copied.at[n])
        return scales

    def turn(self, i: jax.Array) -> tuple[Any, jax.Array]:
        """Return the buffer for the probabilities of the `i`-th step."""
        turn = lax.rem(i, TURNS)
        return self.memory.probabilities.at[:, pl.ds(turn * QUERIES, QUERIES)], turn

    def vectors(self, slot: Any, part: Any) -> Any:
        """Return a function of `n`: the `n`-th vector of a slice of the queries, for all keys."""
        numbers = self.memory.vector_ring.at[slot]
        return lambda n: along(load(numbers.at[n, part], BY_COLUMN), (ROWS, part.size), 1)

    def multiply(self, n: int, total: Any, a: Any, b: Any) -> None:
        tcgen05.multiply(self.memory.ready.at[n], self.memory.done.at[n], (total, a, b))

    def loop(self, count: jax.Array, step: Any) -> jax.Array:
        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        return lax.fori_loop(0, count, step, zeros)

    def store(self, n: int, memory: Any, total: jax.Array) -> None:
        dk, dv = self.results
        target = head_of((dv, dk)[n], self.head).at[pl.ds(self.row, ROWS)]
        store([tcgen05.rearranged(memory, total)], self.memory.staged.at[n], target)
