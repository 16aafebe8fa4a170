"""Casts of a matrix to f8 in both directions, and its amaxes: one pass over memory each.

Every kernel here and in `quantize_blocks` walks over tiles of `x` with as many blocks as the device
runs at a time. The copy engine brings tiles into shared memory while earlier ones are processed,
and takes the results away. A tile is read once from memory but twice from shared memory: directly
for `q`, and through its transposed view for `q_t`. So both directions are the same code on lines of
the tile, and a reduction along a line never leaves a warp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.matmul.hopper.measured import measured
from jfp8.matmul.hopper.tiles import multiprocessors, padded, swizzled
from jfp8.scaling.formats import Format
from jfp8.tracing.compat import kernels_are_interpreted

# How a warpgroup holds the lines of a tile: four neighbours to a thread where they are rows, which
# makes words of f8, and two where they are columns, which is what a transposing load gives.
ROWS, COLUMNS = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA

Ref: TypeAlias = Any  # to memory or shared memory


@dataclass(frozen=True)
class Sweep:
    """How a kernel walks over its input.

    Attributes:
      rows, columns: size of a tile, multiples of 64.
      stages: tiles of the input in shared memory, one being processed and the others being loaded.
      blocks: blocks that share the tiles; by default two for each multiprocessor, which together
        must fit into its shared memory.
    """

    rows: int = 128
    columns: int = 128
    stages: int = 2
    blocks: int = field(default_factory=lambda: 2 * multiprocessors())


def both_ways(dtype: jax.typing.DTypeLike) -> Sweep:
    """Tiles with which two blocks fit a multiprocessor, each with two tiles and both results."""
    return Sweep(rows=128 if jnp.dtype(dtype).itemsize == 2 else 64)


def fastest(kernel: str, x: jax.Array, otherwise: Sweep) -> Sweep:
    """What was measured to be fastest for `x`, with 16-bit elements; else `otherwise`."""
    found = measured(kernel, *x.shape) if x.dtype.itemsize == 2 else None
    return otherwise if found is None else Sweep(**found)


# Shared by the kernels.


def run(
    name: str,
    kernel: Callable[..., None],
    x: jax.Array,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    staged: Sequence[Any] = (),
    sweep: Sweep,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Results of ``kernel(x, *arrays, *out, *staged)``; `staged` is in shared memory."""
    return plgpu.kernel(
        kernel,
        out_type=tuple(out),
        scratch_types=tuple(staged),
        grid=(blocks(x, sweep),),
        grid_names=("block",),
        interpret=interpret,
        kernel_name=f"jfp8_{name}",
    )(x, *arrays)


def blocks(x: Ref, sweep: Sweep) -> int:
    """Number of blocks that `run` starts."""
    return min(sweep.blocks, (x.shape[0] // sweep.rows) * (x.shape[1] // sweep.columns))


def for_each_tile(
    body: Callable[..., Any],
    x: Ref,
    *vectors: tuple[Ref, int],
    sweep: Sweep,
    wanted: jax.Array | None = None,
    carry: Any = None,
) -> Any:
    """``body(i, j, tile, *parts, [carry])`` for those tiles of `x` that are this block's.

    Args:
      body: gets the position of the tile, and tile and parts in shared memory; if there is a
        `carry`, it returns the next one.
      x: matrix in memory, of whole tiles.
      vectors: vectors in memory, each with the dimension of `x` that it belongs to.
      sweep: size of the tiles, and how many blocks share them.
      wanted: bool[]; if False nothing is read.
      carry: its first value.
    """
    down, across = x.shape[0] // sweep.rows, x.shape[1] // sweep.columns
    total, stride, block = down * across, blocks(x, sweep), lax.axis_index("block")
    steps = lax.div(total - 1 - block, stride) + 1 if total % stride else total // stride
    if wanted is not None:
        steps = jnp.where(wanted, steps, 0)

    def position(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile = block + step * stride
        return lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))

    def part(dimension: int) -> plgpu.BlockSpec:
        size = (sweep.rows, sweep.columns)[dimension]
        return plgpu.BlockSpec((size,), lambda step: (position(step)[dimension],))

    tile = plgpu.BlockSpec(
        (sweep.rows, sweep.columns), position, transforms=swizzled(x.dtype, sweep.columns)
    )
    return plgpu.emit_pipeline(
        lambda step, *refs: body(*position(*step), *refs),
        grid=(steps,),
        in_specs=[tile, *(part(dimension) for _, dimension in vectors)],
        max_concurrent_steps=sweep.stages,
        init_carry=carry,
    )(x, *(vector for vector, _ in vectors))


def staging(sweep: Sweep, fmt: Format) -> list[Any]:
    """Shared memory for a tile on its way out, and for its transpose."""
    shapes = (sweep.rows, sweep.columns), (sweep.columns, sweep.rows)
    return [plgpu.SMEM(s, fmt.dtype, transforms=swizzled(fmt.dtype, s[1])) for s in shapes]


def read(tile: Ref, layout: Any) -> jax.Array:
    """A tile, its transposed view, or a part of a vector, in registers."""
    # Not optimized: the reads of ROWS meet two to a bank. Optimized ones do not, but cost a select
    # for every word, and instructions are scarcer here than shared memory's time.
    return plgpu.load(tile, layout=layout, optimized=False)


def write(values: jax.Array, staged: Ref, target: Ref) -> None:
    """``target = values``, through `staged`."""
    # The two directions alternate, each in its own `staged`: with at most one copy in flight, this
    # one is free. At the end of a kernel `finish` waits for both.
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    staged[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, target)


def finish() -> None:
    """Wait until all is written: the last line of a kernel that calls `write`."""
    plgpu.wait_smem_to_gmem(0)


def per_line(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value for each line, repeated along the lines."""
    return lax.broadcast_in_dim(values, shape, (0,))


def lane(dtype: jax.typing.DTypeLike) -> Any:
    """The signed integer type as wide as `dtype`."""
    return {2: np.int16, 4: np.int32}[jnp.dtype(dtype).itemsize]


def magnitude(x: jax.Array) -> jax.Array:
    """The bits of ``|x|`` as integers of type `lane`, in the order ``finite < Inf < NaN``."""
    integer = lane(x.dtype)
    return lax.bitcast_convert_type(x, integer) & integer(np.iinfo(integer).max)


def no_amax(x: Ref, sweep: Sweep) -> jax.Array:
    """Zero magnitudes for the rows of a tile, in the layout that a maximum along them gives."""
    return plgpu.layout_cast(jnp.zeros((sweep.rows,), lane(x.dtype)), ROWS.reduce(1))


def from_magnitude(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The f32 value of a result of `magnitude`, for an `x` of `dtype`."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def f32_magnitude(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What `magnitude` would give for ``x.astype(f32)``, as int32, which memory handles well."""
    return lax.bitcast_convert_type(from_magnitude(bits, dtype), jnp.int32)


def saturating(values: jax.Array, fmt: Format, interpret: Any) -> jax.Array:
    """f32 `values` cast to `fmt`; finite ones saturate."""
    # The device's conversion (cvt.rn.satfinite) saturates by itself.
    if interpret or kernels_are_interpreted():
        values = jnp.clip(values, -np.float32(fmt.max), np.float32(fmt.max))
    return values.astype(fmt.dtype)


# The kernels.


def tensor_amax(
    x: jax.Array,
    known: jax.Array | None = None,
    *,
    sweep: Sweep | None = None,
    interpret: Any = False,
) -> jax.Array:
    """``max(|x|)``; NaN if an element is NaN, Inf if one is Inf.

    Args:
      x: f32, bf16 or f16[M, N].
      known: f32[]; if positive, `x` is not read and the result is 0.
      sweep: how to walk over `x`.
      interpret: see ``plgpu.kernel``; likewise below.

    Returns:
      f32[].
    """
    sweep = sweep or replace(both_ways(x.dtype), stages=3)
    x = padded(x, sweep.rows, sweep.columns)

    def kernel(x: Ref, *refs: Ref) -> None:
        *expected, largest = refs
        wanted = jnp.logical_not(expected[0][0] > 0) if expected else None

        def body(i, j, tile, largest):
            largest = jnp.maximum(largest, jnp.max(magnitude(read(tile, ROWS)), axis=1))
            plgpu.commit_smem()  # read by all, before the copy engine puts the next tile there
            return largest

        found = for_each_tile(body, x, sweep=sweep, wanted=wanted, carry=no_amax(x, sweep))
        largest[lax.axis_index("block")] = jnp.max(f32_magnitude(found, x.dtype))

    expected = () if known is None else (known.reshape(1),)
    out = jax.ShapeDtypeStruct((blocks(x, sweep),), jnp.int32)
    (largest,) = run(
        "tensor_amax", kernel, x, *expected, out=[out], sweep=sweep, interpret=interpret
    )
    return lax.bitcast_convert_type(jnp.max(largest), jnp.float32)


def row_and_column_amax(
    x: jax.Array, *, sweep: Sweep | None = None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """``max(|x|)`` of every row and of every column: (f32[M], f32[N]) of x[M, N]."""
    m, n = x.shape
    otherwise = replace(both_ways(x.dtype), stages=3)
    sweep = sweep or fastest("row_and_column_amax", x, otherwise)
    x = padded(x, sweep.rows, sweep.columns)

    def kernel(x: Ref, rows: Ref, columns: Ref) -> None:
        def body(i, j, tile):
            at_row = pl.ds(i * sweep.rows, sweep.rows)
            at_column = pl.ds(j * sweep.columns, sweep.columns)
            by_row = jnp.max(magnitude(read(tile, ROWS)), axis=1)
            rows[j, at_row] = f32_magnitude(by_row, x.dtype)
            by_column = jnp.max(magnitude(read(tile.T, COLUMNS)), axis=1)
            columns[i, at_column] = f32_magnitude(by_column, x.dtype)
            plgpu.commit_smem()  # as above

        for_each_tile(body, x, sweep=sweep)

    out = [
        jax.ShapeDtypeStruct((x.shape[1] // sweep.columns, x.shape[0]), jnp.int32),
        jax.ShapeDtypeStruct((x.shape[0] // sweep.rows, x.shape[1]), jnp.int32),
    ]
    rows, columns = run("row_and_column_amax", kernel, x, out=out, sweep=sweep, interpret=interpret)
    rows, columns = (
        lax.bitcast_convert_type(jnp.max(part, axis=0), jnp.float32) for part in (rows, columns)
    )
    return rows[:m], columns[:n]


def quantize_both(
    x: jax.Array,
    row_inverse: jax.Array,
    column_inverse: jax.Array,
    fmt: Format,
    *,
    with_amax: bool,
    sweep: Sweep | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """``q = cast(x * row_inverse[:, None])``, ``q_t = cast(x * column_inverse).T`` and the amax.

    Finite values saturate; Inf and NaN become NaN.

    Args:
      x: f32, bf16 or f16[M, N].
      row_inverse: reciprocals of the scales of `q`: f32[] or f32[M].
      column_inverse: those of `q_t`: f32[] or f32[N].
      fmt: E4M3FN or E5M2.
      with_amax: whether to compute the amax of `x` as well.
      sweep: how to walk over `x`.
      interpret: see `tensor_amax`.

    Returns:
      f8[M, N], f8[N, M], and f32[] or None.
    """
    m, n = x.shape
    sweep = sweep or fastest("quantize_both", x, both_ways(x.dtype))
    cut = (sweep.rows, sweep.columns)
    x = padded(x, *cut)
    rows, columns = x.shape
    inverses = [jnp.asarray(v, jnp.float32) for v in (row_inverse, column_inverse)]
    by_line = [v.ndim > 0 for v in inverses]
    inverses = [padded(v.reshape(-1), unit if v.ndim else 1) for v, unit in zip(inverses, cut)]

    def kernel(x, row_inverse, column_inverse, q, q_t, *refs: Ref) -> None:
        *largest, staged, staged_t = refs

        def body(i, j, tile, *parts_and_amax):
            parts = iter(parts_and_amax)
            row_part = next(parts) if by_line[0] else row_inverse[0]
            column_part = next(parts) if by_line[1] else column_inverse[0]
            amax = next(parts, None)

            def cast(values, part, layout):
                values = values.astype(jnp.float32)
                values = values + values * 0  # Inf becomes NaN, all else is unchanged
                factor = part
                if part.ndim:
                    factor = per_line(read(part, layout.reduce(1)), values.shape)
                return saturating(values * factor, fmt, interpret)

            at_row = pl.ds(i * sweep.rows, sweep.rows)
            at_column = pl.ds(j * sweep.columns, sweep.columns)
            values = read(tile, ROWS)
            if amax is not None:
                amax = jnp.maximum(amax, jnp.max(magnitude(values), axis=1))
            write(cast(values, row_part, ROWS), staged, q.at[at_row, at_column])
            values = read(tile.T, COLUMNS)
            write(cast(values, column_part, COLUMNS), staged_t, q_t.at[at_column, at_row])
            return amax

        vectors = [(v, d) for d, v in enumerate((row_inverse, column_inverse)) if by_line[d]]
        amax = for_each_tile(
            body, x, *vectors, sweep=sweep, carry=no_amax(x, sweep) if with_amax else None
        )
        if with_amax:
            largest[0][lax.axis_index("block")] = jnp.max(f32_magnitude(amax, x.dtype))
        finish()

    out = [jax.ShapeDtypeStruct(s, fmt.dtype) for s in ((rows, columns), (columns, rows))]
    if with_amax:
        out.append(jax.ShapeDtypeStruct((blocks(x, sweep),), jnp.int32))
    q, q_t, *largest = run(
        "quantize_both",
        kernel,
        x,
        *inverses,
        out=out,
        staged=staging(sweep, fmt),
        sweep=sweep,
        interpret=interpret,
    )
    amax = lax.bitcast_convert_type(jnp.max(largest[0]), jnp.float32) if with_amax else None
    return q[:m, :n], q_t[:n, :m], amax
