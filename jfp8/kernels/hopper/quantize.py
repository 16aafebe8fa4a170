"""Casts of a matrix to f8 in both directions, and its amaxes: one pass over memory each.

All kernels take ``how``, options of `Walk.over`: tiles, the dtype to which elements are cast when
they are read, and the function that computes the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper import sweep
from jfp8.kernels.hopper.sweep import COLUMNS, ROWS, Input, Ref, Walk, both_ways, fastest
from jfp8.kernels.shared_memory import along, padded
from jfp8.matmul.spec import LARGEST_FACTOR
from jfp8.scaling.formats import Format


def tensor_amax(
    x: Input, *known: jax.Array, unless: Callable[..., jax.Array] | None = None, **how: Any
) -> jax.Array:
    """Return the amaxes of `parts` slices of `x`, as bits of f32; 0 for an empty slice.

    The largest integer is ``max(|x|)``; NaN if an element is NaN, Inf if one is Inf.

    Args:
      x: f32, bf16 or f16[M, N]; or the arrays it is computed from, see `Walk.over`.
      known: vectors for `unless`.
      unless: of references to `known`, bool[]. If it is true `x` is not read; all results are 0.
    """
    walk = Walk.over(x, both_ways(x, stages=3), **how)

    def kernel(x: Sequence[Ref], *refs: Ref) -> None:
        *known, amaxes = refs
        wanted = None if unless is None else jnp.logical_not(unless(*known))

        def body(i, j, tile, largest):
            found = jnp.max(sweep.magnitude(sweep.read(tile, ROWS, walk.dtype)), axis=1)
            largest = jnp.maximum(largest, found)
            plgpu.commit_smem()  # all have read, before the copy engine writes the next tile
            return largest

        found = walk.for_each_tile(body, x, wanted=wanted, carry=sweep.no_amax(walk))
        sweep.write_amax(amaxes, found, walk)

    out = [jax.ShapeDtypeStruct((sweep.parts(),), jnp.int32)]
    (amaxes,) = walk.run("tensor_amax", kernel, *known, out=out)
    return amaxes


def row_and_column_amax(x: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array]:
    """Return ``max(|x|)`` of every row and of every column: (f32[M], f32[N]) of x[M, N]."""
    walk = Walk.over(x, fastest("row_and_column_amax", x, both_ways(x, stages=3)), **how)

    def kernel(x: Sequence[Ref], rows: Ref, columns: Ref) -> None:
        def body(i, j, tile):
            at_row, at_column = walk.sweep.part(i, j)
            by_row = jnp.max(sweep.magnitude(sweep.read(tile, ROWS, walk.dtype)), axis=1)
            rows[j, at_row] = sweep.f32_magnitude(by_row, walk.dtype)
            by_column = jnp.max(sweep.magnitude(sweep.read(tile.T, COLUMNS, walk.dtype)), axis=1)
            columns[i, at_column] = sweep.f32_magnitude(by_column, walk.dtype)
            plgpu.commit_smem()  # as above

        walk.for_each_tile(body, x)

    (down, across), (of_rows, of_columns) = walk.tiles, walk.shape
    shapes = (across, of_rows), (down, of_columns)
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    parts = walk.run("row_and_column_amax", kernel, out=out)
    bits = (jnp.max(part, axis=0) for part in parts)
    rows, columns = (lax.bitcast_convert_type(x, jnp.float32) for x in bits)
    m, n = walk.sizes
    return rows[:m], columns[:n]


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
      scale_of: of references to `known`: the scale and its reciprocal, f32[].
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
    walk = Walk.over(x, fastest("quantize_tensor", x, both_ways(x)), **how)
    return _quantize("quantize_tensor", walk, known, prepare, fmt, out, with_amax)


def quantize_lines(
    x: jax.Array, row_inverse: jax.Array, column_inverse: jax.Array, fmt: Format, **how: Any
) -> tuple[jax.Array, ...]:
    """Return ``cast(x * row_inverse[:, None])`` and ``cast(x * column_inverse).T``.

    Finite values saturate; Inf and NaN become NaN. The inverses are f32[M] and f32[N].
    """
    walk = Walk.over(x, fastest("quantize_lines", x, both_ways(x)), **how)
    rows, columns = walk.sweep.rows, walk.sweep.columns
    inverses = padded(row_inverse, rows), padded(column_inverse, columns)
    take = lambda known, results: tuple(known)
    return _quantize("quantize_lines", walk, inverses, take, fmt)


def _quantize(
    name: str,
    walk: Walk,
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
        by_line = [factor.ndim > 0 for factor in factors]

        def body(i, j, tile, *parts_and_amax):
            vectors = iter(parts_and_amax)
            row_factor, column_factor = (
                next(vectors) if is_vector else factor
                for factor, is_vector in zip(factors, by_line, strict=True)
            )
            amax = next(vectors, None)

            def cast(values, factor, layout):
                values = values.astype(jnp.float32)
                values = values + values * 0  # Inf becomes NaN, all else is unchanged
                if factor.ndim:
                    factor = along(sweep.read(factor, layout.reduce(1)), values.shape, 0)
                return sweep.saturating(values * factor, fmt)

            at_row, at_column = walk.sweep.part(i, j)
            values = sweep.read(tile, ROWS, walk.dtype)
            if amax is not None:
                amax = jnp.maximum(amax, jnp.max(sweep.magnitude(values), axis=1))
            sweep.write(cast(values, row_factor, ROWS), staged, q.at[at_row, at_column])
            values = sweep.read(tile.T, COLUMNS, walk.dtype)
            sweep.write(cast(values, column_factor, COLUMNS), staged_t, q_t.at[at_column, at_row])
            return amax

        vectors = [(v, d) for d, v in enumerate(factors) if by_line[d]]
        carry = sweep.no_amax(walk) if with_amax else None
        amax = walk.for_each_tile(body, x, *vectors, carry=carry)
        if with_amax:
            sweep.write_amax(results[-1], amax, walk)
        plgpu.wait_smem_to_gmem(0)

    return walk.run_both_ways(name, kernel, *known, fmt=fmt, more=more)
