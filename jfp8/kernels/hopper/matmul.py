"""Matmuls of f8 matrices on Hopper's tensor cores: ``y = a @ b.T``, scaled after or in the sum.

All matmuls use one kernel. A block of three warpgroups stays on its multiprocessor and computes
tiles of the output, one after another. One warpgroup only copies: 128 columns of `a` and of `b` at
a time, into a ring of shared memory. The other two multiply, each its half of the tile's rows::

    memory    copy 0 | copy 1 | copy 2 | (0 is free) copy 3 | ... | copies for the next tile
    compute            product 0 | product 1 | product 2 | ... | scale, round, store | product 0

`full[slot]` completes when a slot's copies have arrived, `empty[slot]` when both halves have read
it. If sums are promoted, the tensor cores work for one warpgroup while the other adds.

In a cluster of two, each block copies half of the rows of `b` to both. So `empty[slot]` completes
when all four halves have been read, of its own block and of the other, which copies to it, too.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.ring import copy_each, drain
from jfp8.kernels.hopper.tiles import NO_OTHER_BARRIERS, Corner, Grid, Tiles, ranked, store
from jfp8.kernels.hopper.wgmma import BY_COLUMN, BY_ELEMENT, BY_ROW, cut, scaled, slices
from jfp8.kernels.shared_memory import COMPUTE, along, filled, load, padded, release, staging, tile

BLOCK = 128  # terms in a slot of the ring, in a promotion, of a row of block scales
COLUMNS = 64  # n is padded to this: each such slice of a tile has one scale of 128 x 128
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # per thread: 128 * (40 + 2 * 232) <= 65536


# Traced and lowered once for all matmuls of some shapes, forward and backward.
@functools.partial(jax.jit, static_argnames=("out_dtype", "promote", "tiles"))
def matmul(
    a: jax.Array,
    b: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    promote: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Compute ``y[i, j] = (sum_k a[i, k] * b[j, k]) * row_scale[i] * column_scale[j]``.

    Args:
      a, b: ``f8[M, K]`` and ``f8[N, K]``, e4m3fn or e5m2 in any mix.
      row_scale, column_scale: f32, of shape ``[M]`` and ``[N]``, or a single number.
      out_dtype: f32, bf16 or f16: the scaled f32 sum is rounded once.
      promote: add the tensor cores' sum to a sum in f32 after every 128 of K ("full accumulation").
        Otherwise one sum runs through the tensor cores, which keep fewer bits of it ("fast").
    """
    scales = {
        "rows" if row_scale.ndim else "row": row_scale,
        "columns" if column_scale.ndim else "column": column_scale,
    }
    tiles = tiles or ranked("promoted" if promote else "running", len(a), *b.shape)[0]
    return _product(a, b, scales, out_dtype, promote, tiles)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def block_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    *,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Compute ``y[i, j] = sum_t (sum_{k in block t} a[i, k] b[j, k]) a_scale[t, i] b_scale[t, j]``.

    The tensor cores compute the inner sums, of 128 terms; everything else is f32.

    Args:
      a_scale: ``f32[ceil(K/128), M]``.
      b_scale: ``f32[ceil(K/128), N]``, or ``f32[ceil(K/128), ceil(N/128)]``: one for 128 columns.
        Instead of `b_scale`, `a_scale` may have one for 128 rows.
    """
    by_tile = [s.shape[1] == pl.cdiv(len(x), BLOCK) for x, s in ((a, a_scale), (b, b_scale))]
    transposed = by_tile == [True, False]
    if transposed:  # scales by tile are cheap for columns only
        a, b, a_scale, b_scale = b, a, b_scale, a_scale
    kind, of_b = ("block", "b_tiles") if any(by_tile) else ("block_columns", "b_blocks")
    scales = {"a_blocks": a_scale, of_b: b_scale}
    tiles = tiles or ranked(kind, len(a), *b.shape)[0]
    return _product(a, b, scales, out_dtype, True, tiles, transposed)


def _product(
    a: jax.Array,
    b: jax.Array,
    scales: dict[str, jax.Array],
    out_dtype: jax.typing.DTypeLike,
    promote: bool,
    tiles: Tiles,
    transposed: bool = False,
) -> jax.Array:
    """Return the matmul, or its transpose."""
    (m, k), n = a.shape, b.shape[0]
    of_result = slice(None, None, -1 if transposed else 1)  # the order of its dimensions
    if 0 in (m, n, k):
        return jnp.zeros((m, n)[of_result], out_dtype)
    height = COMPUTE * tiles.tile_m
    a, b = padded(a, height * tiles.cluster, BLOCK), padded(b, COLUMNS, BLOCK)
    grid, k = Grid.of(len(a), len(b), height, tiles), a.shape[1]
    lengths = {"rows": len(a), "a_blocks": len(a), "columns": len(b), "b_blocks": len(b)}
    operands = {
        name: padded(x, *x.shape[:-1], lengths.get(name, 1)) if x.ndim else x.reshape(1)
        for name, x in scales.items()
    }

    def kernel(a: Any, b: Any, scale: dict[str, Any], out: Any, **shared: Any) -> None:
        memory, warpgroup = SimpleNamespace(**shared), lax.axis_index("warpgroup")
        block = _Block(grid, k, promote, transposed, a, b, scale, out, memory, warpgroup)
        lax.cond(warpgroup < COMPUTE, block.multiply, block.copy)

    product = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((grid.rows, grid.columns)[of_result], out_dtype),
        grid=(grid.clusters,),
        grid_names=("sm",),
        cluster=(tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(grid, set(scales), a.dtype, b.dtype, out_dtype, transposed),
        compiler_params=NO_OTHER_BARRIERS,
        kernel_name="jfp8_block_matmul" if "a_blocks" in scales else "jfp8_matmul",
    )
    return product(a, b, operands)[tuple(map(slice, (m, n)[of_result]))]


def _scratch(
    grid: Grid, scales: set[str], a: Any, b: Any, out: Any, transposed: bool
) -> dict[str, Any]:
    """Return the shared memory of a block for such dtypes."""
    tiles, lengths = grid.tiles, {"a_blocks": grid.height, "b_blocks": grid.tiles.tile_n}
    in_ring = {name: length for name, length in lengths.items() if name in scales}
    scratch = {
        "a_ring": tile((tiles.stages, grid.height, BLOCK), a),
        "b_ring": tile((tiles.stages, tiles.tile_n, BLOCK), b),
        "full": plgpu.Barrier(num_arrivals=2 + len(in_ring), num_barriers=tiles.stages),
        # All threads arrive: each warp knows only that its own rows are multiplied.
        "empty": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiles.stages),
        "staging": staging(tiles.tile_m, out, slots=2, transposed=transposed),
    }
    if grid.shared:  # one thread arrives for a warpgroup, at the barriers of both blocks
        scratch["empty"] = plgpu.ClusterBarrier(
            collective_axes=(grid.shared,), num_arrivals=COMPUTE, num_barriers=tiles.stages
        )
    for name, length in in_ring.items():
        scratch[f"{name}_ring"] = plgpu.SMEM((tiles.stages, length), jnp.float32)
    if "columns" in scales:
        scratch["columns"] = plgpu.SMEM((COMPUTE, tiles.tile_n), jnp.float32)
        scratch["copied"] = plgpu.Barrier(num_barriers=COMPUTE)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Block:
    """The tasks of a block's warpgroups, with references to device memory and to shared memory.

    Scales after the sum are "row" | "rows" and "column" | "columns", one number or a vector; before
    each promotion "a_blocks", and "b_tiles" | "b_blocks".
    """

    grid: Grid
    k: int
    promote: bool
    transposed: bool  # True if `out` is
    a: Any
    b: Any
    scale: dict[str, Any]
    out: Any
    memory: SimpleNamespace  # with the names of `_scratch`
    warpgroup: jax.Array  # asked for once: in a loop the question is a shuffle

    @property
    def steps(self) -> int:  # per tile
        return self.k // BLOCK

    @property
    def parts(self) -> list[Any]:
        """Return slices of a tile's columns, each of which has one scale and stays in registers."""
        return slices(self.grid.tiles.tile_n, COLUMNS)

    def tiles(self) -> jax.Array:
        """Return the number of tiles that this block computes."""
        return (self.grid.size - 1 - lax.axis_index("sm")) // self.grid.clusters + 1

    def corner(self, i: jax.Array) -> Corner:
        return self.grid.corner(lax.axis_index("sm") + i * self.grid.clusters)

    def copy(self) -> None:
        """Fill the ring, with scales that are vectors: the task of one warpgroup."""
        stages, steps = self.grid.tiles.stages, self.steps
        to_all = functools.partial(plgpu.copy_gmem_to_smem, collective_axes=self.grid.shared)
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @pl.loop(0, self.tiles())
        def _(i):
            row, column, _ = self.corner(i)
            rows, columns = pl.ds(row, self.grid.height), pl.ds(column, self.grid.tiles.tile_n)

            def copy(t, slot):
                k, full = pl.ds(t * BLOCK, BLOCK), self.memory.full.at[slot]
                plgpu.copy_gmem_to_smem(self.a.at[rows, k], self.memory.a_ring.at[slot], full)
                to_all(self.b.at[columns, k], self.memory.b_ring.at[slot], full)
                if "a_blocks" in self.scale:
                    scale = self.scale["a_blocks"].at[t, rows]
                    plgpu.copy_gmem_to_smem(scale, self.memory.a_blocks_ring.at[slot], full)
                if "b_blocks" in self.scale:
                    scale = self.scale["b_blocks"].at[t, columns]
                    to_all(scale, self.memory.b_blocks_ring.at[slot], full)

            copy_each(steps, stages, self.memory.empty, copy, i * steps)

        # In a cluster, the other block has read its last copies, too: none is on its way to either.
        drain(self.tiles() * steps, stages, self.memory.empty)

    def multiply(self) -> None:
        """Compute one half of the rows of each tile: the task of a warpgroup."""
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        @pl.loop(0, self.tiles())
        def _(i):
            corner = self.corner(i)
            row = corner.row + self.warpgroup * self.grid.tiles.tile_m
            by_row = self.request_scales(row, corner.column)
            total = self.promoted(i, corner.column) if self.promote else self.running(i)
            self.store(total, by_row, row, corner)

        plgpu.wait_smem_to_gmem(0)

    def wait(self, step: jax.Array) -> tuple[Any, Any]:
        """Return this warpgroup's operands of a step, once they have arrived."""
        slot = lax.rem(step, self.grid.tiles.stages)
        plgpu.barrier_wait(self.memory.full.at[slot])
        return self.memory.a_ring.at[slot, self.half()], self.memory.b_ring.at[slot].T

    def half(self) -> Any:
        """Return this warpgroup's rows of the block."""
        return pl.ds(self.warpgroup * self.grid.tiles.tile_m, self.grid.tiles.tile_m)

    def release(self, step: jax.Array) -> None:
        empty = self.memory.empty.at[lax.rem(step, self.grid.tiles.stages)]
        release(empty, cluster=bool(self.grid.shared))

    def running(self, i: jax.Array) -> list[jax.Array]:
        """Return one sum over all of k. A matmul is issued before the previous one is done."""

        def scope(acc):
            @pl.loop(0, self.steps)
            def _(t):
                step = i * self.steps + t
                a, b = self.wait(step)
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(1)

                @pl.when(t > 0)
                def _():
                    self.release(step - 1)

            total = acc[...]
            self.release((i + 1) * self.steps - 1)
            return total

        shape = self.grid.tiles.tile_m, self.grid.tiles.tile_n
        return cut(pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32)), self.parts)

    def promoted(self, i: jax.Array, column: jax.Array) -> list[jax.Array]:
        """Return an f32 sum of the tensor cores' sums of 128 terms, each times its scales."""

        def step(t, carry):
            total, tile_scales = carry
            a, b = self.wait(i * self.steps + t)
            by_row, by_part = self.ring_scales(i * self.steps + t)

            def product(acc):
                plgpu.wgmma(acc, a, b)
                # Loaded a step ahead, and after wgmma: the compiler makes everything after these
                # loads wait for them.
                following = self.tile_scales(jnp.minimum(t + 1, self.steps - 1), column)
                return acc[...], following

            shape = self.grid.tiles.tile_m, self.grid.tiles.tile_n
            partial, following = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            self.release(i * self.steps + t)
            partial = scaled(cut(partial, self.parts), by_row, tile_scales or by_part)
            return [x + y for x, y in zip(total, partial, strict=True)], following

        total = [filled(0.0, (self.grid.tiles.tile_m, COLUMNS), BY_ELEMENT)] * len(self.parts)
        return lax.fori_loop(0, self.steps, step, (total, self.tile_scales(0, column)))[0]

    def ring_scales(self, step: jax.Array) -> tuple[Any, list[jax.Array]]:
        """Return scales copied with a step's operands: of rows, and of each slice of columns."""
        slot = lax.rem(step, self.grid.tiles.stages)
        by_row, by_part = None, []
        if "a_blocks" in self.scale:
            by_row = load(self.memory.a_blocks_ring.at[slot, self.half()], BY_ROW)
        if "b_blocks" in self.scale:
            ring = self.memory.b_blocks_ring
            by_part = [load(ring.at[slot, part], BY_COLUMN) for part in self.parts]
        return by_row, by_part

    def tile_scales(self, t: Any, column: jax.Array) -> list[jax.Array]:
        """Return scalar scales of block `t` of k, one for each slice of the columns."""
        if "b_tiles" not in self.scale:
            return []
        starts = [column + part.start for part in self.parts]
        return [self.scale["b_tiles"][t, lax.div(c, BLOCK)] for c in starts]

    def request_scales(self, row: jax.Array, column: jax.Array) -> Any:
        """Request the scales of a tile's rows. `store` waits for the scales of its columns."""
        if "columns" in self.scale:
            plgpu.copy_gmem_to_smem(
                self.scale["columns"].at[pl.ds(column, self.grid.tiles.tile_n)],
                self.memory.columns.at[self.warpgroup],
                self.memory.copied.at[self.warpgroup],
            )
        if "rows" in self.scale:
            return load(self.scale["rows"].at[pl.ds(row, self.grid.tiles.tile_m)], BY_ROW)
        return self.scale["row"][0] if "row" in self.scale else None

    def store(self, total: list[jax.Array], by_row: Any, row: jax.Array, corner: Corner) -> None:
        """Scale, round and write a tile, while the next one's operands are already copied."""
        warpgroup, tile_m = self.warpgroup, self.grid.tiles.tile_m
        width = self.memory.staging.shape[-2 if self.transposed else -1]
        shape = (tile_m, width)
        if "rows" in self.scale:
            by_row = along(by_row, shape, 0)
        if "columns" in self.scale:
            plgpu.barrier_wait(self.memory.copied.at[warpgroup])

        def of_columns(c: int, y: jax.Array) -> jax.Array:
            y = y if by_row is None else y * by_row
            if "columns" in self.scale:
                columns = self.memory.columns.at[warpgroup, pl.ds(c * width, width)]
                return y * along(load(columns, BY_COLUMN), shape, 1)
            return y * self.scale["column"][0] if "column" in self.scale else y

        parts = [y for part in total for y in cut(part, slices(COLUMNS, width))]
        parts = (of_columns(c, y) for c, y in enumerate(parts))
        slots = self.memory.staging.at[warpgroup]
        store(parts, slots, self.out, row, corner, transposed=self.transposed)
