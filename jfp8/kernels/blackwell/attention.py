"""Attend to f8 matrices on Blackwell's tensor cores, forward and backward.

A block computes 256 rows of the output, or of dQ. Both multiplying warpgroups take 128 queries
each, and loop over the blocks of 128 keys that one of these queries sees. Each starts its own
matmuls, so that one multiplies while the other computes its tiles. Sums over blocks are in
registers: the matmul of each block has a separate scale.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.blackwell import tcgen05
from jfp8.kernels.blackwell.tcgen05 import BY_COLUMN, BY_ELEMENT, BY_ROW, ROWS
from jfp8.kernels.flash import launch, tiles
from jfp8.kernels.flash.problem import BLOCK, QUERIES, Bounds, Problem
from jfp8.kernels.flash.ring import drain, head_of, store
from jfp8.kernels.flash.tile_work import COMPUTE_REGISTERS
from jfp8.kernels.flash.tiles import BackwardTile, ForwardTile, KeyTile
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, release, staging, tile

HALF = BLOCK // 2
TURNS = 2  # buffers for probabilities


@dataclasses.dataclass(frozen=True)
class ForwardByTcgen05(ForwardTile):
    """Compute attention of a tile of queries, and the logarithm of the denominator.

    In tensor memory, a warpgroup stores the scores, later overwritten by ``w . v``, and next to
    them the weights `w` in f8, which the tensor cores read.
    """

    name = "attention_blackwell"
    tokens = COMPUTE * ROWS

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {
            "scores": tcgen05.sums(BLOCK),
            "weights": tcgen05.factors(BLOCK, jnp.float8_e4m3fn),
            "ready": tcgen05.ordered(),
            "done": tcgen05.ordered(),
        }

    def attend(self) -> None:
        mine, row, factor = self.begin(BY_ROW)
        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        bounds = self.bounds()
        start, stop = self.steps(bounds)

        def step(t, carry):
            return self.step(mine, factor, bounds, row, t, t - start, carry)

        carry = zeros, filled(-jnp.inf, (ROWS,), BY_ROW), filled(0.0, (ROWS,), BY_ROW)
        total, highest, sums = lax.fori_loop(start, stop, step, carry)
        (out, lse), rows = self.results, pl.ds(row, ROWS)
        lse[self.head, rows], inverse = tiles.ended(highest, sums)
        result = total * along(inverse, total.shape, 0)
        memory = self.memory.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        target = head_of(out, self.head).at[rows]
        store([tcgen05.rearranged(memory, result)], self.memory.staged.at[mine], target)

    def step(
        self, mine: Any, factor: Any, bounds: Bounds, row: Any, t: Any, i: Any, carry: Any
    ) -> Any:
        """Add one block of keys, the `i`-th of the ring."""
        m = self.memory
        (total, before, sums), slot = carry, lax.rem(i, self.stages)
        ready, done = m.ready.at[mine], m.done.at[mine]
        scores = m.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        weights = m.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]

        def seen(x, otherwise, part):
            if not self.bounded():
                return x
            return tcgen05.where_seen(bounds, row, t * BLOCK + part.start, x, otherwise)

        def scales(ring, part):
            return along(load(ring.at[slot, part], BY_COLUMN), (ROWS, part.size), 1)

        def logits(part):
            x = tcgen05.read(scores.at[:, part]) * scales(m.k_scale_ring, part)
            return seen(x, -jnp.inf, part)

        def largest_scale(part, largest):
            x = seen(scales(m.v_scale_ring, part), 0.0, part)
            return jnp.maximum(largest, jnp.max(x, axis=1))

        plgpu.barrier_wait(m.full.at[slot])
        smallest = filled(tiles.SMALLEST_UNIT, (ROWS,), BY_ROW)
        unit = tcgen05.by_parts(BLOCK, largest_scale, smallest)
        tcgen05.multiply(ready, done, (scores, m.queries.at[mine], m.key_ring.at[slot]))
        largest = lambda part, x: jnp.maximum(x, jnp.max(logits(part), axis=1))
        largest = tcgen05.by_parts(BLOCK, largest, filled(-jnp.inf, (ROWS,), BY_ROW))
        highest, shift, shrink = tiles.raised(before, largest, factor, unit)

        def weigh(part, added):
            p = tiles.probabilities(logits(part), factor, shift)
            tcgen05.write(weights.at[:, part], p * scales(m.v_scale_ring, part))
            return added + jnp.sum(p, axis=1)

        sums = sums * shrink + tcgen05.by_parts(BLOCK, weigh, filled(0.0, (ROWS,), BY_ROW)) * unit
        plgpu.commit_tmem()

        products = m.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]  # in place of the scores
        tcgen05.multiply(ready, done, (products, weights, m.value_ring.at[slot]))
        release(m.empty.at[slot])
        total = total * along(shrink, total.shape, 0)
        return tcgen05.added(total, products, unit), highest, sums


@dataclasses.dataclass(frozen=True)
class QueryGradientByTcgen05(BackwardTile):
    """Compute dQ of a tile of queries, and the largest ``|dS|`` of each.

    Tensor memory has room for dP of half the keys; dS replaces the scores, and the matmul's result
    replaces dS.
    """

    name = "attention_dq_blackwell"
    tokens = COMPUTE * ROWS

    @staticmethod
    def between(p: Problem) -> dict[str, Any]:
        return {
            "scores": tcgen05.sums(BLOCK),
            "half": tcgen05.sums(HALF),
            "weights": tcgen05.factors(BLOCK, p.formats[0].dtype),
            "ready": tcgen05.ordered(),
            "done": tcgen05.ordered(),
        }

    def attend(self) -> None:
        mine, row, of_row = self.begin(BY_ROW)
        bounds = self.bounds()
        start, stop = self.steps(bounds)

        def step(t, carry):
            return self.step(mine, of_row, bounds, row, t, t - start, carry)

        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT), filled(0.0, (ROWS,), BY_ROW)
        total, found = lax.fori_loop(start, stop, step, zeros)
        (dq, largest), rows = self.results, pl.ds(row, ROWS)
        largest[self.head, rows] = found
        memory = self.memory.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        result = tcgen05.rearranged(memory, total * self.p.scale)
        store([result], self.memory.staged.at[mine], head_of(dq, self.head).at[rows])

    def step(
        self, mine: Any, of_row: list[Any], bounds: Bounds, row: Any, t: Any, i: Any, carry: Any
    ) -> Any:
        """Add one block of keys, number `t` of all, the `i`-th of the ring."""
        m = self.memory
        (total, largest), slot = carry, lax.rem(i, self.stages)
        ready, done = m.ready.at[mine], m.done.at[mine]
        scores = m.scores.at[:, pl.ds(mine * BLOCK, BLOCK)]
        half = m.half.at[:, pl.ds(mine * HALF, HALF)]
        weights = m.weights.at[:, pl.ds(mine * BLOCK, BLOCK)]
        plgpu.barrier_wait(m.full.at[slot])

        def differentiate(first, part, carry):
            largest, largest_scaled = carry
            keys = pl.ds(first + part.start, part.size)
            vector = lambda n: load(m.scale_ring.at[slot, n, keys], BY_COLUMN)
            by_key = lambda n: along(vector(n), (ROWS, part.size), 1)
            by_row = lambda n: along(of_row[n], (ROWS, part.size), 0)
            p = jnp.exp2(tcgen05.read(scores.at[:, keys]) * by_key(0) * by_row(0) - by_row(1))
            if self.bounded():
                p = tcgen05.where_seen(bounds, row, t * BLOCK + keys.start, p, 0.0)
            x = p * (tcgen05.read(half.at[:, part]) * by_key(1) * by_row(2) - by_row(3))
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
            x = x * by_key(2)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(scores.at[:, keys], x)
            return largest, jnp.maximum(largest_scaled, jnp.max(jnp.abs(x), axis=1))

        found = largest, filled(0.0, (ROWS,), BY_ROW)
        for first in (0, HALF):
            values = m.value_ring.at[slot, pl.ds(first, HALF)]
            products = [(half, m.grads.at[mine], values)]
            if first == 0:
                products += [(scores, m.queries.at[mine], m.key_ring.at[slot])]
            tcgen05.multiply(ready, done, *products)
            found = tcgen05.by_parts(HALF, partial(differentiate, first), found)
        largest, largest_scaled = found
        plgpu.commit_tmem()
        scale, inverse = scale_and_inverse(largest_scaled, self.p.formats[0], "power_of_two")
        tcgen05.write_all(weights, scores, inverse)
        products = m.scores.at[:, pl.ds(mine * BLOCK, self.p.size)]
        tcgen05.multiply(ready, done, (products, weights, m.k_t_ring.at[slot]))
        release(m.empty.at[slot])
        return tcgen05.added(total, products, scale), largest


@dataclasses.dataclass(frozen=True)
class KeyGradientsByTcgen05(KeyTile):
    """Compute dK and dV of a tile of 128 keys, from blocks of 64 queries.

    One warpgroup computes probabilities and dV, the other dS and dK. Probabilities pass from one to
    the other through tensor memory, alternating between two buffers.
    """

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
        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        total = lax.fori_loop(0, count, step, zeros)
        drain(count, TURNS, m.used)
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

        zeros = filled(0.0, (ROWS, self.p.size), BY_ELEMENT)
        total = lax.fori_loop(0, self.count(self.steps()), step, zeros)
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

    def store(self, n: int, memory: Any, total: jax.Array) -> None:
        dk, dv = self.results
        target = head_of((dv, dk)[n], self.head).at[pl.ds(self.row, ROWS)]
        store([tcgen05.rearranged(memory, total)], self.memory.staged.at[n], target)


attention_forward = partial(launch.attention_forward, ForwardByTcgen05)
attention_backward = partial(
    launch.attention_backward, QueryGradientByTcgen05, KeyGradientsByTcgen05
)
