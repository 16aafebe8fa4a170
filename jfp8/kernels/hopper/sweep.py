"""Iterate over a matrix in kernels that quantize: one pass over memory.

They iterate over its tiles with as many blocks as the device runs at a time. The copy engine loads
tiles into shared memory while earlier ones are processed, and stores the results. A tile is
read once from memory but twice from shared memory: directly for ``q``, and through its transposed
view for ``q^T``. So both directions run the same code on lines of the tile, and a reduction along a
line never leaves a warp.

A matrix computed elementwise from others is never in memory: tiles of the others are loaded,
and its own tile overwrites the first. Several matrices computed from the same ones, side by
side, are computed at once, and processed one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.elementary import elementary
from jfp8.kernels.hopper.tiles import multiprocessors
from jfp8.kernels.scales_in_kernels import bitcast
from jfp8.kernels.shared_memory import load, padded, swizzled, tile
from jfp8.scaling.formats import Format
from jfp8.tracing.compat import kernels_are_interpreted

# Layout of the lines of a tile in a warpgroup: four neighbors per thread for rows, which
# form words of f8, and two for columns, the result of a transposing load.
ROWS, COLUMNS = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA

Ref: TypeAlias = Any  # to memory or shared memory

# Elementwise function of f32 arrays of one shape: an array, or a tuple of several.
Make: TypeAlias = Callable[..., Any]

# A matrix [M, N], or its inputs: arrays [M, N] or [M, projections, N].
Input: TypeAlias = jax.Array | Sequence[jax.Array]


@dataclass(frozen=True)
class Sweep:
    """Describe the tiles of a matrix."""

    rows: int = 128  # rows of a tile; they and `columns` are multiples of 64
    columns: int = 128
    stages: int = 2  # tiles in shared memory, one being processed and the others being loaded
    # Blocks that process the tiles: two must fit into a multiprocessor's shared memory.
    blocks: int = field(default_factory=lambda: 2 * multiprocessors())

    def part(self, i: jax.Array, j: jax.Array) -> tuple[Any, Any]:
        """Return the rows and the columns of a tile."""
        return pl.ds(i * self.rows, self.rows), pl.ds(j * self.columns, self.columns)


def arrays_of(x: Input) -> tuple[jax.Array, ...]:
    """Return all arrays of an input: the matrix or the first of its inputs in front."""
    return tuple(x) if isinstance(x, Sequence) else (x,)


def bytes_read(x: Input) -> int:
    """Return the bytes of `x` for each element of a matrix; see `TileLoop.over`."""
    return sum(a.dtype.itemsize * (1 if a.ndim == 2 else a.shape[1]) for a in arrays_of(x))


def both_ways(x: Input, stages: int = 2) -> Sweep:
    """Return tiles with which two blocks fit a multiprocessor, each with `stages`, and results."""
    read = bytes_read(x)
    return Sweep(rows=128 if read == 2 else 64, stages=stages if read <= 4 else 2)


@dataclass(frozen=True)
class TileLoop:
    """Describe how a kernel iterates over a matrix."""

    arrays: tuple[jax.Array, ...]  # in memory, whole tiles: the matrix, or its inputs
    sizes: tuple[int, int]  # sizes of the matrix, or of each of several, unpadded
    dtype: jax.typing.DTypeLike  # dtype to which elements are cast when they are read
    sweep: Sweep
    make: Make | None = None  # None if the input is the matrix itself
    side_by_side: tuple[int, ...] = (1,)  # number of matrices in each array
    outputs: int = 1  # number of matrices that `make` returns; the matrix is all of them

    @classmethod
    def over(
        cls,
        x: Input,
        default: Sweep,
        *,
        sweep: Sweep | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        make: Make | None = None,
    ) -> TileLoop:
        """Return the loop over `x`; its last three arguments are options of all kernels.

        Args:
          x: the matrix, ``[M, N]``; or, if there is a `make`, arrays ``[M, projections, N]`` and
            ``[M, N]`` of one dtype: then the matrix is ``make(x[0][:, 0], x[0][:, 1], ..., x[1])``
            in f32, rounded to their dtype. If `make` returns several, they are side by side.
          sweep: tiles instead of the `default`.
          dtype: dtype to which elements are cast when they are read; None for no cast.
        """
        arrays, sweep = arrays_of(x), sweep or default
        sizes, dtype = (arrays[0].shape[0], arrays[0].shape[-1]), dtype or arrays[0].dtype
        if make is None:
            return cls((padded(arrays[0], sweep.rows, sweep.columns),), sizes, dtype, sweep)
        counts = tuple(1 if a.ndim == 2 else a.shape[1] for a in arrays)
        arrays = (a.reshape(len(a), -1, a.shape[-1]) for a in arrays)
        arrays = [padded(a, sweep.rows, 1, sweep.columns) for a in arrays]
        number = jax.ShapeDtypeStruct((), jnp.float32)
        outputs = len(jax.tree.leaves(jax.eval_shape(make, *[number] * sum(counts))))
        arrays = tuple(a.reshape(len(a), -1) for a in arrays)
        return cls(arrays, sizes, dtype, sweep, elementary(make), counts, outputs)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix, of whole tiles."""
        first = self.arrays[0]
        return first.shape[0], first.shape[1] // self.side_by_side[0] * self.outputs

    @property
    def tiles(self) -> tuple[int, int]:
        """Return the number of tiles, down and across, of each matrix."""
        rows, columns = self.shape
        return rows // self.sweep.rows, columns // self.outputs // self.sweep.columns

    @property
    def blocks(self) -> int:
        return min(self.sweep.blocks, math.prod(self.tiles))

    def whole(self, x: jax.Array, axis: int, *sizes: int) -> jax.Array:
        """Return a result of a kernel without the padding of its tiles, of these `sizes`.

        If several matrices are made, the `axis` of columns becomes two, the first their number.
        """
        before, (columns, *after) = x.shape[:axis], x.shape[axis:]
        x = x.reshape(*before, self.outputs, columns // self.outputs, *after)
        kept = [slice(size) for size in sizes]
        first = 0 if self.outputs == 1 else slice(None)
        return x[(*kept[:axis], first, *kept[axis:])]

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        *arrays: jax.Array,
        out: Sequence[jax.ShapeDtypeStruct],
        staged: Sequence[Any] = (),
    ) -> Sequence[jax.Array]:
        """Return results of ``kernel(x, *arrays, *out, *staged)``; `staged` is in shared memory."""
        count = len(self.arrays)
        return plgpu.kernel(
            lambda *refs: kernel(refs[:count], *refs[count:]),
            out_type=tuple(out),
            scratch_types=tuple(staged),
            grid=(self.blocks,),
            grid_names=("block",),
            kernel_name=f"jfp8_{name}",
        )(*self.arrays, *arrays)

    def run_both_ways(
        self,
        name: str,
        kernel: Callable[..., None],
        *arrays: jax.Array,
        fmt: Format,
        more: Sequence[jax.ShapeDtypeStruct],
    ) -> tuple[jax.Array, ...]:
        """Return results of ``kernel(x, *arrays, q, q_t, *more, staged, staged_t)``."""
        both = [jax.ShapeDtypeStruct(s, fmt.dtype) for s in (self.shape, self.shape[::-1])]
        staged = staging(self.sweep, fmt)
        q, q_t, *others = self.run(name, kernel, *arrays, out=[*both, *more], staged=staged)
        return self.whole(q, 1, *self.sizes), self.whole(q_t, 0, *self.sizes[::-1]), *others

    def for_each_tile(
        self,
        body: Callable[..., Any],
        x: Sequence[Ref],
        *vectors: tuple[Ref, int],
        carry: Any = None,
    ) -> Any:
        """Call ``body(i, j, tile, *parts, [carry])`` for the tiles of this block.

        Args:
          body: gets the position of the tile, and tile and slices in shared memory; if there is a
            `carry`, it returns the next one.
          vectors: vectors in memory, each with the matrix dimension that it belongs to. Not
            supported if several matrices are computed.
        """
        sweep, (down, across) = self.sweep, self.tiles
        total, stride, block = down * across, self.blocks, lax.axis_index("block")
        steps = lax.div(total - 1 - block, stride) + 1 if total % stride else total // stride

        def position(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            tile = block + step * stride
            return lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))

        def part(dimension: int) -> plgpu.BlockSpec:
            size = (sweep.rows, sweep.columns)[dimension]
            return plgpu.BlockSpec((size,), lambda step: (position(step)[dimension],))

        def tile(array: Ref, beside: int) -> plgpu.BlockSpec:
            def place(step: jax.Array) -> tuple[jax.Array, jax.Array]:
                i, j = position(step)
                return i, j + beside * across

            transforms = swizzled(array.dtype, sweep.columns)
            return plgpu.BlockSpec((sweep.rows, sweep.columns), place, transforms=transforms)

        counts = zip(x, self.side_by_side, strict=True)
        read = [(a, p) for a, count in counts for p in range(count)]

        def of_tile(step: tuple[jax.Array], *refs: Ref) -> Any:
            tiles, parts = refs[: len(read)], refs[len(read) :][: len(vectors)]
            state = refs[len(read) + len(vectors) :]
            i, j = position(*step)
            if self.make is not None:
                make_in_place(self.make, tiles)
            for output in range(self.outputs):
                found = body(i, j + output * across, tiles[output], *parts, *state)
                state = (found,) if state else ()
            return state[0] if state else None

        specs = [*(tile(*each) for each in read), *(part(dimension) for _, dimension in vectors)]
        return plgpu.emit_pipeline(
            of_tile,
            grid=(steps,),
            in_specs=specs,
            max_concurrent_steps=sweep.stages,
            init_carry=carry,
        )(*(array for array, _ in read), *(vector for vector, _ in vectors))


def make_in_place(make: Make, tiles: Sequence[Ref]) -> None:
    """Assign ``tiles[0], ... = make(*tiles)``: each thread writes what it has read itself."""
    for at in itertools.product(*(range(0, size, 64) for size in tiles[0].shape)):
        part = tuple(pl.ds(first, 64) for first in at)  # all at once would not fit the registers
        values = (plgpu.load(tile.at[part], layout=COLUMNS) for tile in tiles)
        made = jax.tree.leaves(make(*(each.astype(jnp.float32) for each in values)))
        for target, each in zip(tiles, made, strict=False):
            target[part] = each.astype(target.dtype)
    plgpu.commit_smem()  # `body` reads it in other layouts


def staging(sweep: Sweep, fmt: Format) -> list[Any]:
    """Return shared memory for a tile of results, and for its transpose."""
    shapes = (sweep.rows, sweep.columns), (sweep.columns, sweep.rows)
    return [tile(shape, fmt.dtype) for shape in shapes]


def read(tile: Ref, layout: Any, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Return a tile, its transposed view, or a slice of a vector, in registers, as `dtype`."""
    # Not optimized: reads of ROWS have two-way bank conflicts. Optimized reads cost a select
    # for every word instead, and instructions are scarcer than bandwidth of shared memory.
    values = load(tile, layout)
    return values if dtype is None else values.astype(dtype)


def write(values: jax.Array, staged: Ref, target: Ref) -> None:
    """Assign ``target = values``, through `staged`."""
    # The two directions alternate, each in its own `staged`: with at most one copy in flight, this
    # one is free. A kernel ends with `plgpu.wait_smem_to_gmem(0)`, which waits for both.
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    staged[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, target)


def lane(dtype: jax.typing.DTypeLike) -> Any:
    """Return the signed integer type as wide as `dtype`."""
    return {2: np.int16, 4: np.int32}[jnp.dtype(dtype).itemsize]


def magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of ``|x|`` as integers of type `lane`, ordered ``finite < Inf < NaN``."""
    integer = lane(x.dtype)
    return lax.bitcast_convert_type(x, integer) & integer(np.iinfo(integer).max)


def from_magnitude(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the f32 value of a result of `magnitude`, for an `x` of `dtype`."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def f32_magnitude(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return `magnitude` of ``x.astype(f32)``, as int32, which memory handles well."""
    return lax.bitcast_convert_type(from_magnitude(bits, dtype), jnp.int32)


def saturating(values: jax.Array, fmt: Format) -> jax.Array:
    """Return f32 `values` cast to `fmt`; finite values saturate."""
    # The device's conversion (cvt.rn.satfinite) saturates by itself.
    if kernels_are_interpreted():
        values = jnp.clip(values, -np.float32(fmt.max), np.float32(fmt.max))
    return values.astype(fmt.dtype)


def parts() -> int:
    """Return the number of amaxes that kernels write, for any matrix: at least one per block."""
    return 4 * multiprocessors()


def write_amax(target: Ref, amax: jax.Array, loop: TileLoop) -> None:
    """Write the amax of a block to its entries of `target`, each as many as there are blocks on."""
    count, at = loop.blocks, lax.axis_index("block")
    largest = jnp.max(f32_magnitude(amax, loop.dtype))

    def write_one(i, _):
        target[at + i * count] = largest

    lax.fori_loop(0, lax.div(target.shape[0] - 1 - at, count) + 1, write_one, None)


def largest_of(amaxes: Ref) -> jax.Array:
    """Return the largest amax that another kernel has computed, f32[]."""
    largest = jnp.max(plgpu.load(amaxes, layout=plgpu.Layout.WG_STRIDED((amaxes.shape[0],), 1)))
    return bitcast(largest, jnp.float32)
