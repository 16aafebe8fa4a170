"""Casts of a matrix to f8, with the amaxes for which XLA would read it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.kernels.tpu.matmul import ONE_NUMBER, TILE, VMEM, Ref, along_rows, divisor, in_hbm
from jfp8.kernels.tpu.sharded import LANES
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import ScaleRounding
from jfp8.tracing.compat import of_varying


@of_varying
@partial(jax.jit, static_argnames=("fmt", "dtype"))
def quantize_tensor(
    x: jax.Array, inverse: jax.Array, fmt: Format, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute ``q = cast(x * inverse)`` and the amax of `x`. Finite values saturate; others: NaN.

    `x` is an f32 or bf16 matrix whose sizes are multiples of 128, cast to `dtype` when it is read;
    `inverse`, f32[1, 1], is the reciprocal of the scale.

    Returns:
      f8 matrix, and int32[8, 128], the bits of amaxes, the largest of which belongs to `x`.
    """

    def kernel(inverse, x, q, largest):
        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _():
            largest[...] = jnp.zeros_like(largest)

        found = largest[...]
        for at in _squares(rows, columns):
            values = _read(x, dtype, *at)
            found = jnp.maximum(found, jnp.max(_magnitude(values).reshape(-1, 8, LANES), 0))
            values = values + values * 0  # Inf becomes NaN, all else is unchanged
            q[at] = _cast(values * inverse[0, 0], fmt)
        largest[...] = found

    rows, columns = sizes = divisor(x.shape[0]), divisor(x.shape[1])
    largest = jax.ShapeDtypeStruct((8, LANES), jnp.int32)
    whole = pl.BlockSpec(largest.shape, lambda i, j: (0, 0))
    results = [_result(x, sizes, fmt.dtype), (largest, whole)]
    return _run("quantize_tensor", kernel, sizes, [inverse, x], [ONE_NUMBER], results)


@of_varying
@partial(jax.jit, static_argnames="dtype")
def line_amaxes(
    x: jax.Array, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the amaxes of rows and of columns, in one read; see `quantize_tensor`.

    Returns:
      int32[p, M] and int32[q, N], the bits of amaxes of slices of a line, the largest of which
      along the first dimension belongs to the line.
    """
    (m, n), sizes = x.shape, (divisor(x.shape[0]), divisor(x.shape[1]))
    rows, columns = sizes

    def kernel(x, by_row, by_column):
        by_row[...], by_column[...] = jnp.zeros_like(by_row), jnp.zeros_like(by_column)
        for i, j in _squares(rows, columns):
            bits = _magnitude(_read(x, dtype, i, j))
            for line, found, at in ((by_row, bits.T, i), (by_column, bits, j)):
                in_eight = jnp.max(found.reshape(-1, 8, LANES), 0)
                line[:, at] = jnp.maximum(line[:, at], in_eight)

    down, across = pl.cdiv(m, rows), pl.cdiv(n, columns)
    out = [jax.ShapeDtypeStruct((8 * p, s), jnp.int32) for p, s in ((across, m), (down, n))]
    specs = [
        pl.BlockSpec((8, rows), lambda i, j: (j, i)),
        pl.BlockSpec((8, columns), lambda i, j: (i, j)),
    ]
    return _run("line_amaxes", kernel, sizes, [x], [], list(zip(out, specs, strict=True)))


@of_varying
@partial(jax.jit, static_argnames=("fmt", "dtype"))
def quantize_lines(
    x: jax.Array,
    row_inverse: jax.Array,
    column_inverse: jax.Array,
    fmt: Format,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return ``cast(x * row_inverse)`` and ``cast(x * column_inverse)``, see `quantize_tensor`.

    The inverses are f32[M, 1] and f32[1, N].
    """
    rows, columns = sizes = divisor(x.shape[0]), divisor(x.shape[1])

    def kernel(by_row, by_column, x, q, q_other):
        for i, j in _squares(rows, columns):
            values = _read(x, dtype, i, j)
            values = values + values * 0
            q[i, j] = _cast(values * by_row[i, :], fmt)
            q_other[i, j] = _cast(values * by_column[:, j], fmt)

    specs = [
        pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
        pl.BlockSpec((1, columns), lambda i, j: (0, j)),
    ]
    operands, results = [row_inverse, column_inverse, x], [_result(x, sizes, fmt.dtype)] * 2
    return _run("quantize_lines", kernel, sizes, operands, specs, results)


@of_varying
@partial(jax.jit, static_argnames=("fmt", "block", "scale_rounding", "dtype"))
def quantize_blocks(
    x: jax.Array,
    fmt: Format,
    block: int,
    scale_rounding: ScaleRounding,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return `x` in blocks of ``1 x block`` along its rows, and in blocks of ``block x 1``. ::

        q[i, j]       = cast(x[i, j] / s[j // block, i])
        q_other[i, j] = cast(x[i, j] / s_other[i // block, j])

    The scales are from `scaling.scale_from_amax`; a block with a NaN or Inf becomes NaN.

    Returns:
      ``q`` f8[M, N], ``s`` [N / block, M], ``q_other`` f8[M, N], ``s_other`` [M / block, N]; scales
      in f32, or in uint8, E8M0 codes, if the rounding gives E8M0.
    """
    rows, columns = sizes = _sizes(x)

    def kernel(x, q, s, q_other, s_other, by_row, by_column):
        for i, j in _squares(rows, columns):
            bits = _magnitude(_read(x, dtype, i, j))
            by_row[_blocks(j, block), i] = _largest(bits.T, block)
            by_column[_blocks(i, block), j] = _largest(bits, block)
        for scales, found in ((s, by_row), (s_other, by_column)):
            _to_inverses(found, scales, fmt, scale_rounding)
        for i, j in _squares(rows, columns):
            values = _read(x, dtype, i, j)
            inverse = _inverse(by_row[_blocks(j, block), i], block).T
            q[i, j] = _cast(values * inverse, fmt, scale_rounding)
            inverse = _inverse(by_column[_blocks(i, block), j], block)
            q_other[i, j] = _cast(values * inverse, fmt, scale_rounding)

    scale = _scale_dtype(scale_rounding)
    codes = _result(x, sizes, fmt.dtype)
    of_rows = _result(x, sizes, scale, block, transposed=True)
    of_columns = _result(x, sizes, scale, block)
    shapes = (columns // block, rows), (rows // block, columns)
    scratch = [pltpu.VMEM(shape, jnp.int32) for shape in shapes]
    results = [codes, of_rows, codes, of_columns]
    return _run(f"quantize_blocks_{block}", kernel, sizes, [x], [], results, scratch)


@of_varying
@partial(jax.jit, static_argnames=("fmt", "block", "scale_rounding", "dtype"))
def quantize_tiles(
    x: jax.Array,
    fmt: Format,
    block: int,
    scale_rounding: ScaleRounding,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `x` in blocks of ``block x block``, which serve sums over rows and over columns.

    Returns:
      f8[M, N], and the scales ``[M / block, N]``, each repeated for the columns of its block.
    """
    rows, columns = sizes = _sizes(x)

    def kernel(x, q, s, by_block):
        for i, j in _squares(rows, columns):
            by_column = _largest(_magnitude(_read(x, dtype, i, j)), block)
            by_row = _largest(along_rows(by_column, block).T, block)
            by_block[_blocks(i, block), j] = _largest(along_rows(by_row, block).T, block)
        _to_inverses(by_block, s, fmt, scale_rounding)
        for i, j in _squares(rows, columns):
            inverse = _inverse(by_block[_blocks(i, block), j], block)
            q[i, j] = _cast(_read(x, dtype, i, j) * inverse, fmt, scale_rounding)

    results = [_result(x, sizes, fmt.dtype), _result(x, sizes, _scale_dtype(scale_rounding), block)]
    scratch = [pltpu.VMEM((rows // block, columns), jnp.int32)]
    return _run(f"quantize_tiles_{block}", kernel, sizes, [x], [], results, scratch)


def _result(x, sizes, dtype, unit=1, transposed=False):
    """Return the type of a result, and its block for a tile: a number for every `unit` of a column.

    If `transposed`, for every `unit` of a row, as rows of the result.
    """
    (m, n), (rows, columns) = x.shape, sizes
    if transposed:
        part = pl.BlockSpec((columns // unit, rows), lambda i, j: (j, i))
        return jax.ShapeDtypeStruct((n // unit, m), dtype), part
    part = pl.BlockSpec((rows // unit, columns), lambda i, j: (i, j))
    return jax.ShapeDtypeStruct((m // unit, n), dtype), part


def _run(name, kernel, sizes, operands, in_specs, results, scratch=()):
    """Return ``kernel(*operands, *results)`` for each tile of the last operand, of these `sizes`.

    `in_specs` are of the other operands, `results` types and blocks.
    """
    x, (rows, columns), (out, out_specs) = operands[-1], sizes, zip(*results, strict=True)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(x.shape[0], rows), pl.cdiv(x.shape[1], columns)),
        in_specs=[*in_specs, pl.BlockSpec(sizes, lambda i, j: (i, j))],
        out_specs=list(out_specs),
        out_shape=[pltpu.HBM(a.shape, a.dtype) for a in out],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * x.size,
            transcendentals=0,
            bytes_accessed=sum(a.size * np.dtype(a.dtype).itemsize for a in [*operands, *out]),
        ),
        name=f"jfp8_{name}",
    )(*in_hbm(operands))


def _sizes(x: jax.Array) -> tuple[int, int]:
    """Return rows and columns of a tile, of which the last may reach beyond `x`.

    If each block is separate, values read there are harmless, and nothing is written there.
    Tiles of their scales must be whole.
    """
    return min(x.shape[0], TILE), min(x.shape[1], TILE)


def _squares(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of a tile that fit the registers."""
    at = lambda size: (slice(first, first + LANES) for first in range(0, size, LANES))
    return itertools.product(at(rows), at(columns))


def _blocks(part: slice, block: int) -> slice:
    return slice(part.start // block, part.stop // block)


def _read(x: Ref, dtype: jax.typing.DTypeLike | None, *at: slice) -> jax.Array:
    values = x[at] if dtype is None else x[at].astype(dtype)
    return values.astype(jnp.float32)


def _magnitude(values: jax.Array) -> jax.Array:
    """Return the bits of ``|values|``, which order as finite, Inf, NaN."""
    return lax.bitcast_convert_type(values, jnp.int32) & np.int32(0x7FFFFFFF)


def _largest(bits: jax.Array, block: int) -> jax.Array:
    """Return the largest of each `block` rows: ``[rows / block, n]``."""
    return jnp.max(bits.reshape(-1, block, bits.shape[1]), 1)


def _inverse(bits: jax.Array, block: int) -> jax.Array:
    """Return reciprocals of scales from their bits, each repeated `block` times along columns."""
    return along_rows(lax.bitcast_convert_type(bits, jnp.float32), block)


def _cast(values: jax.Array, fmt: Format, scale_rounding: ScaleRounding = None) -> jax.Array:
    """Return `values` in `fmt`; finite values saturate, unless this rounding prevents it."""
    if scale_rounding not in ("power_of_two", "rceil"):
        values = jnp.clip(values, -np.float32(fmt.max), np.float32(fmt.max))
    return values.astype(fmt.dtype)


def _to_inverses(found: Ref, scales: Ref, fmt: Format, scale_rounding: ScaleRounding) -> None:
    """Write scales from the bits of amaxes, and the bits of their reciprocals in place of these."""
    largest = lax.bitcast_convert_type(found[...], jnp.float32)
    scales[...], inverse = scale_and_inverse(largest, fmt, scale_rounding)
    found[...] = lax.bitcast_convert_type(inverse, jnp.int32)


def _scale_dtype(scale_rounding: ScaleRounding) -> Any:
    return jnp.float32 if scale_rounding in (None, "power_of_two") else jnp.uint8
