"""Matmuls of a mixture of experts: tiles of 128 rows, each with the matrix of its group.

Both kernels accumulate alike: the tensor cores sum 128 terms of the contraction, and these
sums, times their scales, are added to sums in f32. One warpgroup copies operands in advance;
two multiply, each its half of the rows. A block stays on its multiprocessor and computes slices of
the output, one after another::

    memory    copy 0 | copy 1 | copy 2 | ... | last | copy 0 of the next slice | ...
    compute            add up 0 | add up 1 | ... | add up last | round, store | add up 0 | ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.ring import copy_each, drain
from jfp8.kernels.hopper.tiles import NO_OTHER_BARRIERS, Corner, Grid, Tiles, multiprocessors, store
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, padded, tile

BLOCK = 128  # rows of a tile, terms of one sum in the tensor cores, columns of a scale of b
COLUMNS = 64  # columns that share a scale of b, and are stored together
ROWS = BLOCK // COMPUTE
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # per thread: 128 * (40 + 2 * 232) <= 65536

# The widest slices whose sums, in the tensor cores and in f32, and scales fit into the registers.
_TILES = Tiles(tile_m=ROWS, tile_n=192, stages=4, group=16)
_WITH_SCALES_OF_COLUMNS = dataclasses.replace(_TILES, tile_n=128)


def grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    group: jax.Array,
    a_scale: jax.Array | None,
    b_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Multiply each tile of 128 rows by the transposed matrix of its group. ::

        y[i, j] = sum_c (sum_{k in c} a[i, k] b[g, j, k]) * a_scale[c, i] * b_scale[g, c, j // 128]

    with ``g = group[i // 128]``, over chunks ``c`` of 128 along ``k``.

    Args:
      a, b: ``f8[T * 128, K]`` and ``f8[G, N, K]``, e4m3fn or e5m2 in any mix.
      group: ``i32[T]``, less than ``G``. A tile with a negative group gives zeros, at no cost.
      a_scale: ``f32[ceil(K/128), T * 128]``, or None if all are one.
      b_scale: ``f32[G, ceil(K/128), ceil(N/128)]``.
      out_dtype: f32, bf16 or f16: the f32 sum is rounded once.
    """
    (m, k), (groups, n, _) = a.shape, b.shape
    if 0 in (m, n, k, groups):
        return jnp.zeros((m, n), out_dtype)
    a, b = padded(a, 1, BLOCK), padded(b, 1, COLUMNS, BLOCK)
    tiles = tiles or _TILES
    grid = Grid.of(m, b.shape[1], BLOCK, tiles)
    strips = grid.tiles.tile_n // COLUMNS
    operands = {"a": a, "b": b, "group": group, "a_scale": a_scale, "b_scale": b_scale}

    def part(refs: dict[str, Any], out: Any, number: jax.Array) -> _Part:
        corner = grid.corner(number)
        g = refs["group"][lax.div(corner.row, BLOCK)]

        def factors(t: jax.Array) -> list[jax.Array]:
            by_row = None if a_scale is None else _of_rows(refs["a_scale"].at[t], corner)
            starts = (corner.column + i * COLUMNS for i in range(strips))
            of_strips = (refs["b_scale"][g, t, lax.div(start, BLOCK)] for start in starts)
            return [x if by_row is None else by_row * x for x in of_strips]

        steps = jnp.where(g < 0, 0, a.shape[1] // BLOCK)
        return _Part(refs["a"], refs["b"].at[jnp.maximum(g, 0)], out, corner, 0, steps, factors)

    out = jax.ShapeDtypeStruct((m, b.shape[1]), out_dtype)
    return _add_up(part, grid, 1, operands, out)[:, :n]


def grouped_outer(
    a: jax.Array,
    b: jax.Array,
    first: jax.Array,
    count: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array | None,
    out_dtype: jax.typing.DTypeLike,
    *,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Sum over the tiles of each group; zeros for a group without tiles. ::

        y[g, i, j] = sum_t (sum_{k in t} a[i, k] b[j, k]) * a_scale[t, i] * b_scale[t, j]

    over tiles ``first[g] <= t < first[g] + count[g]``, of 128 columns of the operands each.

    Args:
      a, b: ``f8[M, T * 128]`` and ``f8[N, T * 128]``, e4m3fn or e5m2 in any mix.
      first, count: ``i32[G]``, the first tile of each group and its number of tiles, all of which
        must exist.
      a_scale, b_scale: ``f32[T, M]``, and ``f32[T, N]`` or None if all are one.
    """
    (m, k), n, groups = a.shape, b.shape[0], first.shape[0]
    if 0 in (m, n, k, groups):
        return jnp.zeros((groups, m, n), out_dtype)
    a, b = padded(a, BLOCK, 1), padded(b, COLUMNS, 1)
    tiles = tiles or (_TILES if b_scale is None else _WITH_SCALES_OF_COLUMNS)
    grid = Grid.of(a.shape[0], b.shape[0], BLOCK, tiles)
    strips = grid.tiles.tile_n // COLUMNS
    b_scale = None if b_scale is None else padded(b_scale, 1, COLUMNS)
    operands = {"a": a, "b": b, "first": first, "count": count}
    operands |= {"a_scale": padded(a_scale, 1, BLOCK), "b_scale": b_scale}

    def part(refs: dict[str, Any], out: Any, number: jax.Array) -> _Part:
        g, corner = lax.div(number, grid.size), grid.corner(lax.rem(number, grid.size))

        def factors(t: jax.Array) -> list[jax.Array]:
            by_row = _of_rows(refs["a_scale"].at[t], corner)
            if b_scale is None:
                return [by_row] * strips
            starts = (corner.column + i * COLUMNS for i in range(strips))
            of_strips = (load(refs["b_scale"].at[t, pl.ds(c, COLUMNS)], BY_COLUMN) for c in starts)
            return [by_row * along(x, (ROWS, COLUMNS), 1) for x in of_strips]

        steps = refs["first"][g], refs["count"][g]
        return _Part(refs["a"], refs["b"], out.at[g], corner, *steps, factors)

    out = jax.ShapeDtypeStruct((groups, a.shape[0], b.shape[0]), out_dtype)
    return _add_up(part, grid, groups, operands, out)[:, :m, :n]


# Scales. All are loaded from device memory while the tensor cores work.


def _my_rows(start: jax.Array | int = 0) -> Any:
    """Return the rows that this warpgroup computes, of a tile that begins at `start`."""
    return pl.ds(start + lax.axis_index("warpgroup") * ROWS, ROWS)


def _of_rows(scale: Any, corner: Corner) -> jax.Array:
    """Return f32[64, 64] for a warpgroup's rows, constant along each."""
    return along(load(scale.at[_my_rows(corner.row)], BY_ROW), (ROWS, COLUMNS), 0)


# The kernel.


class _Part(NamedTuple):
    """One slice of the output, and its sum. ::

        out[rows, columns] = sum_t (a[rows, t] . b[columns, t]^T) * factors(t)

    over `steps` blocks ``t`` of 128 along the contraction, from `first`. `a`, `b` and `out` are
    references. `factors` gives one factor for each strip, for its sum ``[64, 64]``.
    """

    a: Any
    b: Any
    out: Any
    corner: Corner
    first: jax.Array | int
    steps: jax.Array | int
    factors: Callable[[jax.Array], list[jax.Array]]


def _add_up(
    part: Callable[[dict[str, Any], Any, jax.Array], _Part],
    grid: Grid,
    matrices: int,
    operands: dict[str, Any],
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Compute all slices of `out`, a stack of `matrices` matrices; `part` describes each."""
    tiles, total = grid.tiles, matrices * grid.size
    blocks = min(multiprocessors(), total)

    def kernel(refs: dict[str, Any], out_ref: Any, **shared: Any) -> None:
        block = lax.axis_index("sm")

        def for_each_part(do: Callable[[_Part, jax.Array], None]) -> jax.Array:
            """Call ``do(part, steps of all slices before it)`` for the slices of this block."""

            def one(i: jax.Array, before: jax.Array) -> jax.Array:
                this = part(refs, out_ref, block + i * blocks)
                do(this, before)
                return before + this.steps

            return lax.fori_loop(0, lax.div(total - 1 - block, blocks) + 1, one, jnp.int32(0))

        ring = _Ring(tiles.stages, **shared)
        lax.cond(
            lax.axis_index("warpgroup") < COMPUTE,
            lambda: ring.multiply(for_each_part),
            lambda: ring.copy(for_each_part),
        )

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types={
            "a": tile((tiles.stages, BLOCK, BLOCK), operands["a"].dtype),
            "b": tile((tiles.stages, tiles.tile_n, BLOCK), operands["b"].dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
            "empty": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiles.stages),
            "staging": tile((COMPUTE, 2, ROWS, COLUMNS), out.dtype),
        },
        compiler_params=NO_OTHER_BARRIERS,
        kernel_name="jfp8_grouped_matmul" if len(out.shape) == 2 else "jfp8_grouped_outer",
    )(operands)


_ForEachPart = Callable[[Callable[[_Part, jax.Array], None]], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """References in shared memory: a ring of slots, and staged results.

    ``full[slot]`` completes when the copies of both operands have arrived, ``empty[slot]`` when
    both warpgroups have multiplied them. Steps are counted through all slices of the output.
    """

    stages: int
    a: Any
    b: Any
    full: Any
    empty: Any
    staging: Any

    def copy(self, for_each_part: _ForEachPart) -> None:
        """Copy operands: the task of one warpgroup."""
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        def part(this: _Part, before: jax.Array) -> None:
            rows = pl.ds(this.corner.row, BLOCK)
            columns = pl.ds(this.corner.column, self.b.shape[1])

            def copy(i: jax.Array, slot: jax.Array) -> None:
                at, full = pl.ds((this.first + i) * BLOCK, BLOCK), self.full.at[slot]
                plgpu.copy_gmem_to_smem(this.a.at[rows, at], self.a.at[slot], full)
                plgpu.copy_gmem_to_smem(this.b.at[columns, at], self.b.at[slot], full)

            copy_each(this.steps, self.stages, self.empty, copy, before)

        steps = for_each_part(part)
        drain(steps, self.stages, self.empty)

    def multiply(self, for_each_part: _ForEachPart) -> None:
        """Multiply: the task of a warpgroup, with its half of the rows."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def part(this: _Part, before: jax.Array) -> None:
            add = lambda i, sums: self._add(this, before, i, sums)
            sums = [filled(0.0, (ROWS, COLUMNS), BY_ELEMENT)] * (self.b.shape[1] // COLUMNS)
            sums = lax.fori_loop(0, this.steps, add, sums)
            mine = lax.axis_index("warpgroup")
            row = this.corner.row + mine * ROWS
            store(sums, self.staging.at[mine], this.out, row, this.corner)

        for_each_part(part)
        plgpu.wait_smem_to_gmem(0)

    def _add(
        self, this: _Part, before: jax.Array, i: jax.Array, sums: list[jax.Array]
    ) -> list[jax.Array]:
        """Return the sums of all strips, plus the sums of 128 more terms."""
        slot = lax.rem(before + i, self.stages)
        plgpu.barrier_wait(self.full.at[slot])

        def product(acc: Any) -> tuple[jax.Array, list[jax.Array]]:
            plgpu.wgmma(acc, self.a.at[slot, _my_rows()], self.b.at[slot].T)
            factors = this.factors(this.first + i)
            return acc[...], factors

        y, factors = pl.run_scoped(product, plgpu.ACC((ROWS, self.b.shape[1]), jnp.float32))
        plgpu.barrier_arrive(self.empty.at[slot])
        strips = [y[:, i * COLUMNS : (i + 1) * COLUMNS] for i in range(len(sums))]
        return [total + y * x for total, y, x in zip(sums, strips, factors, strict=True)]
