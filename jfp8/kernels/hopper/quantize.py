"""Casts of a matrix to f8 in both directions, and its amaxes: one pass over memory each.

All kernels take ``how``, options of `TileLoop.over`: tiles, the dtype to which elements are cast
when they are read, and the function that computes the matrix. Rows and columns of tiles are
multiples of a block of scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.elementary import elementary
from jfp8.kernels.hopper import sweep
from jfp8.kernels.hopper.sweep import COLUMNS, ROWS, Input, Ref, Sweep, TileLoop, both_ways
from jfp8.kernels.hopper.tiles import multiprocessors
from jfp8.kernels.scales_in_kernels import bitcast, scale_and_inverse
from jfp8.kernels.shared_memory import along, padded
from jfp8.matmul.spec import LARGEST_FACTOR
from jfp8.scaling.formats import Format
from jfp8.scaling.history import only_amaxes
from jfp8.scaling.scales import ScaleRounding

LINES = 64  # lines of a tile that are in registers at a time
BLOCKS = 256  # blocks of `tensor_amax`, each of which writes one number
_BYTES_AT_ONCE = 16384  # bytes that a block reads at once, enough to fill the memory bus


def tensor_amax(
    x: Input, history: jax.Array, entries: int = 1, dtype: Any = None, make: Any = None
) -> jax.Array:
    """Return the amaxes of slices of `x`, as bits of f32; 0 for an empty slice.

    The largest integer is ``max(|x|)``; NaN if an element is NaN, Inf if one is Inf. If the maximum
    of `only_amaxes` in the first `entries` of `history`, f32[H], is positive, `x` is not read, and
    all results are that maximum. For the others see `TileLoop.over`.
    """
    arrays = sweep.arrays_of(x)
    if make is None:  # matrices with as many elements share a kernel
        length = _BYTES_AT_ONCE // arrays[0].dtype.itemsize
        arrays = (padded(arrays[0].reshape(-1), length).reshape(-1, length),)
    arrays = [padded(a.reshape(len(a), -1, a.shape[-1]), 1, 1, 128) for a in arrays]
    return _tensor_amax(arrays, history, entries, np.dtype(dtype or arrays[0].dtype), make)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _tensor_amax(arrays: Any, history: Any, entries: int, dtype: Any, make: Any) -> jax.Array:
    own, (rows, _, columns) = arrays[0].dtype, arrays[0].shape
    length = math.gcd(columns, _BYTES_AT_ONCE // own.itemsize)
    layout = plgpu.Layout.WG_STRIDED((length,), min(16 // own.itemsize, length // 128))

    def kernel(*refs: Ref) -> None:
        *x, history, amaxes = refs
        block, across = lax.axis_index("block"), columns // length
        # Starts at 0: in `shard_map`, JAX types the first entry as varying, and later ones not.
        larger = lambda i, x: lax.max(x, only_amaxes(history[i]))
        known = lax.fori_loop(0, entries, larger, np.float32(0))
        steps = lax.div(rows * across + BLOCKS - 1 - block, BLOCKS)

        def body(step, largest):
            at = block + step * BLOCKS
            i, part = lax.div(at, across), pl.ds(lax.rem(at, across) * length, length)
            values = [sweep.read(a.at[i, p, part], layout) for a in x for p in range(a.shape[1])]
            if make is not None:
                values = elementary(make)(*(each.astype(jnp.float32) for each in values))
            for each in jax.tree.leaves(values):
                largest = jnp.maximum(largest, sweep.magnitude(each.astype(own).astype(dtype)))
            return largest

        none = plgpu.layout_cast(jnp.zeros((length,), sweep.lane(dtype)), layout)
        largest = lax.fori_loop(0, jnp.where(known > 0, 0, steps), body, none)
        largest = jnp.max(sweep.f32_magnitude(largest, dtype))
        amaxes[block] = jnp.where(known > 0, bitcast(known, jnp.int32), largest)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((BLOCKS,), jnp.int32),
        grid=(BLOCKS,),
        grid_names=("block",),
        kernel_name="jfp8_tensor_amax",
    )(*arrays, history)


def row_and_column_amax(x: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array]:
    """Return ``max(|x|)`` of every row and of every column: (f32[M], f32[N]) of x[M, N]."""
    loop = TileLoop.over(x, both_ways(x, stages=3), **how)

    def kernel(x: Sequence[Ref], rows: Ref, columns: Ref) -> None:
        def body(i, j, tile):
            at_row, at_column = loop.sweep.part(i, j)
            by_row = jnp.max(sweep.magnitude(sweep.read(tile, ROWS, loop.dtype)), axis=1)
            rows[j, at_row] = sweep.f32_magnitude(by_row, loop.dtype)
            by_column = jnp.max(sweep.magnitude(sweep.read(tile.T, COLUMNS, loop.dtype)), axis=1)
            columns[i, at_column] = sweep.f32_magnitude(by_column, loop.dtype)
            plgpu.commit_smem()  # all have read, before the copy engine writes the next tile

        loop.for_each_tile(body, x)

    (down, across), (of_rows, of_columns) = loop.tiles, loop.shape
    shapes = (across, of_rows), (down, of_columns)
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    bits = (jnp.max(x, axis=0) for x in loop.run("row_and_column_amax", kernel, out=out))
    rows, columns = (lax.bitcast_convert_type(x, jnp.float32) for x in bits)
    return rows[: loop.sizes[0]], columns[: loop.sizes[1]]


def quantize_tensor(
    x: Input,
    *known: jax.Array,
    fmt: Format,
    scale_of: Callable[..., tuple[jax.Array, jax.Array]],
    with_amax: bool,
    meets: int = 0,
    **how: Any,
) -> tuple[jax.Array, ...]:
    """Return ``q = cast(x / scale)``, ``q.T``, ``scale``, its products with others, and amaxes.

    Scalars are computed by this kernel: a separate one would take longer to start than to run.
    Finite values saturate; Inf and NaN become NaN.

    Args:
      x: see `tensor_amax`.
      known: vectors for `scale_of`, followed by the scales, f32[1], of operands paired with `x`.
      scale_of: function of references to `known`, to the scale and its reciprocal, f32[].
      meets: number of operands paired with `x`.

    Returns:
      f8[M, N], f8[N, M], the scale f32[1], ``scale * its scale`` for each paired operand, as in
      `scale_products`, f32[1], and if `with_amax` int32[parts()] as of `tensor_amax`. If several
      matrices are computed, f8[M, matrices, N] and f8[matrices, N, M], with one scale.
    """
    first_met = len(known) - meets

    def prepare(known: Sequence[Ref], results: Sequence[Ref]) -> tuple[Any, Any]:
        scale, inverse = scale_of(*known[:first_met])

        @pl.when(lax.axis_index("block") == 0)
        def _():
            results[0][0] = scale
            for factor, other in zip(results[1:], known[first_met:], strict=False):
                factor[0] = jnp.minimum(scale * other[0], LARGEST_FACTOR)

        return inverse, inverse

    out = [jax.ShapeDtypeStruct((1,), jnp.float32)] * (1 + meets)
    out += [jax.ShapeDtypeStruct((sweep.parts(),), jnp.int32)] if with_amax else []
    loop = TileLoop.over(x, both_ways(x), **how)
    return _quantize("quantize_tensor", loop, known, prepare, fmt, out, with_amax)


def quantize_lines(
    x: jax.Array, row_inverse: jax.Array, column_inverse: jax.Array, fmt: Format, **how: Any
) -> tuple[jax.Array, ...]:
    """Return ``cast(x * row_inverse[:, None])`` and ``cast(x * column_inverse).T``.

    Finite values saturate; Inf and NaN become NaN. The inverses are f32[M] and f32[N].
    """
    loop = TileLoop.over(x, both_ways(x), **how)
    rows, columns = loop.sweep.rows, loop.sweep.columns
    inverses = padded(row_inverse, rows), padded(column_inverse, columns)
    take = lambda known, results: tuple(known)
    return _quantize("quantize_lines", loop, inverses, take, fmt)


def _quantize(
    name: str,
    loop: TileLoop,
    known: Sequence[jax.Array],
    prepare: Callable[..., tuple[Any, Any]],
    fmt: Format,
    more: Sequence[jax.ShapeDtypeStruct] = (),
    with_amax: bool = False,
) -> tuple[jax.Array, ...]:
    """Return both directions, and results of the shapes `more`, of which the last are the amaxes.

    `prepare` returns the factors of rows and columns, scalars or references to vectors.
    """

    def kernel(x: Sequence[Ref], *refs: Ref) -> None:
        known_refs, (q, q_t, *results, staged, staged_t) = refs[: len(known)], refs[len(known) :]
        factors = prepare(known_refs, results)

        def direction(tile, factor, layout, staged, target, amax=None):
            def some_lines(step, amax):  # fewer at once than a tile are compiled faster
                lines = pl.ds(step * LINES, LINES)
                values = sweep.read(tile.at[lines], layout, loop.dtype)
                if amax is not None:
                    amax = jnp.maximum(amax, jnp.max(sweep.magnitude(values), axis=1))
                values = values.astype(jnp.float32)
                values = values + values * 0  # Inf becomes NaN, all else is unchanged
                by = sweep.read(factor.at[lines], layout.reduce(1)) if factor.ndim else factor
                staged[lines] = sweep.saturating(values * along(by, values.shape, 0), fmt)
                return amax

            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # see `sweep.write`
            amax = lax.fori_loop(0, tile.shape[0] // LINES, some_lines, amax)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, target)
            return amax

        def body(i, j, tile, *parts_and_amax):
            rest, (at_row, at_column) = iter(parts_and_amax), loop.sweep.part(i, j)
            by_row, by_column = (next(rest) if factor.ndim else factor for factor in factors)
            amax = direction(tile, by_row, ROWS, staged, q.at[at_row, at_column], next(rest, None))
            direction(tile.T, by_column, COLUMNS, staged_t, q_t.at[at_column, at_row])
            return amax

        vectors = [(v, d) for d, v in enumerate(factors) if v.ndim]
        none = plgpu.layout_cast(jnp.zeros((LINES,), sweep.lane(loop.dtype)), ROWS.reduce(1))
        amax = loop.for_each_tile(body, x, *vectors, carry=none if with_amax else None)
        if with_amax:
            sweep.write_amax(results[-1], amax, loop)
        plgpu.wait_smem_to_gmem(0)

    return loop.run_both_ways(name, kernel, *known, fmt=fmt, more=more)


def quantize_rows_in_blocks(
    x: Input, fmt: Format, block: int, scale_rounding: ScaleRounding, **how: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of ``1 x block`` along its rows, and `x.T` along its own rows.

    ``q[i, j] = cast(x[i, j] / s[j // block, i])`` and
    ``q_t[j, i] = cast(x[i, j] / s_t[i // block, j])``, with scales and reciprocals as in
    `quantizers.block_scale`: a block with a NaN or Inf in it becomes NaN as a whole. Blocks are
    the first dimension of the scales, so that scales of neighboring lines are contiguous.

    `x` is f32, bf16 or f16[M, N], or the arrays it is computed from, see `TileLoop.over`; `block`
    is 128 or 32.

    Returns:
      ``q`` f8[M, N], ``s`` [ceil(N / block), M], ``q_t`` f8[N, M], ``s_t`` [ceil(M / block), N].
      The scales are f32, or uint8 E8M0 codes if the rounding gives E8M0. If several matrices are
      computed, their number is a dimension before N, and before the one of the blocks along N.
    """
    loop = TileLoop.over(x, in_blocks(x, block), **how)
    in_row, in_column = loop.sweep.columns // block, loop.sweep.rows // block  # blocks of a tile

    def kernel(x, q, q_t, s, s_t, staged, staged_t) -> None:
        def body(i, j, tile):
            def cast(values, scales, first, lines):
                # Block by block, for all lines simultaneously.
                parts = []
                for b in range(values.shape[1] // block):
                    part = values[:, b * block : (b + 1) * block]
                    amax = sweep.from_magnitude(jnp.max(sweep.magnitude(part), axis=1), loop.dtype)
                    scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
                    store(scales.at[first + b, lines], scale)
                    scaled = part.astype(jnp.float32) * along(inverse, part.shape, 0)
                    parts.append(sweep.saturating(scaled, fmt))
                return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

            at_row, at_column = loop.sweep.part(i, j)
            codes = cast(sweep.read(tile, ROWS, loop.dtype), s, j * in_row, at_row)
            sweep.write(codes, staged, q.at[at_row, at_column])
            codes = cast(sweep.read(tile.T, COLUMNS, loop.dtype), s_t, i * in_column, at_column)
            sweep.write(codes, staged_t, q_t.at[at_column, at_row])

        loop.for_each_tile(body, x)
        plgpu.wait_smem_to_gmem(0)

    scale = jnp.float32 if scale_rounding in (None, "power_of_two") else jnp.uint8
    rows, columns = loop.shape
    scales = (columns // block, rows), (rows // block, columns)
    more = [jax.ShapeDtypeStruct(shape, scale) for shape in scales]
    name = f"quantize_rows_in_blocks_{block}"
    q, q_t, s, s_t = loop.run_both_ways(name, kernel, fmt=fmt, more=more)
    m, n = loop.sizes
    across, down = -(-n // block), -(-m // block)
    return q, loop.whole(s, 0, across, m), q_t, loop.whole(s_t, 1, down, n)


def quantize_tiles(
    x: Input, fmt: Format, scale_rounding: ScaleRounding, **how: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of 128x128, which serve both directions: ``q_t`` is ``q.T``.

    `scale_rounding` is None or ``"power_of_two"``.

    Returns:
      ``q`` f8[M, N], ``q_t`` f8[N, M], scales f32[ceil(M / 128), ceil(N / 128)]. If several
      matrices are computed, see `quantize_rows_in_blocks`.
    """
    loop = TileLoop.over(x, in_blocks(x, 128), **how)
    assert (loop.sweep.rows, loop.sweep.columns) == (128, 128)

    def kernel(x, q, q_t, s, staged, staged_t) -> None:
        def body(i, j, tile):
            values = sweep.read(tile, ROWS, loop.dtype)
            # Only reductions over one dimension at a time can be lowered.
            largest = sweep.f32_magnitude(jnp.max(sweep.magnitude(values), axis=1), loop.dtype)
            amax = bitcast(jnp.max(largest), jnp.float32)
            scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
            s[i, j] = bitcast(scale, jnp.int32)
            cast = lambda values: sweep.saturating(values.astype(jnp.float32) * inverse, fmt)

            at_row, at_column = loop.sweep.part(i, j)
            sweep.write(cast(values), staged, q.at[at_row, at_column])
            values = sweep.read(tile.T, COLUMNS, loop.dtype)
            sweep.write(cast(values), staged_t, q_t.at[at_column, at_row])

        loop.for_each_tile(body, x)
        plgpu.wait_smem_to_gmem(0)

    (m, n), (rows, columns) = loop.sizes, loop.shape
    bits = jax.ShapeDtypeStruct((rows // 128, columns // 128), jnp.int32)  # the scales'
    q, q_t, s = loop.run_both_ways("quantize_tiles", kernel, fmt=fmt, more=[bits])
    s = lax.bitcast_convert_type(s, jnp.float32)
    return q, q_t, loop.whole(s, 1, -(-m // 128), -(-n // 128))


def in_blocks(x: Input, block: int) -> Sweep:
    """Return tiles of whole blocks in both directions, two per multiprocessor; for f32 one.

    One block per multiprocessor, if its tiles are so large that two do not fit.
    """
    read = sweep.bytes_read(x)
    if block != 128 or read < 4:
        return both_ways(x)
    return Sweep(stages=1) if read == 4 else Sweep(stages=12 // read, blocks=multiprocessors())


def store(ref: Any, values: jax.Array) -> None:
    """Assign ``ref[...] = values``; JAX 0.12 needs an explicit byte type."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
