"""Casts of a matrix to f8 in both directions, and its amaxes: one pass over memory each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.sweep import (
    COLUMNS,
    ROWS,
    Input,
    Make,
    Ref,
    Sweep,
    arrays_of,
    both_ways,
    f32_magnitude,
    fastest,
    finish,
    for_each_tile,
    magnitude,
    no_amax,
    parts,
    per_line,
    read,
    run,
    run_both_ways,
    saturating,
    taken,
    write,
    write_amax,
)
from jfp8.kernels.shared_memory import padded
from jfp8.matmul.spec import LARGEST_FACTOR
from jfp8.scaling.formats import Format


def tensor_amax(
    x: Input,
    *known: jax.Array,
    unless: Callable[..., jax.Array] | None = None,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    make: Make | None = None,
) -> jax.Array:
    """The amaxes of `parts` of `x`, as bits of f32; 0 for a part that has no elements.

    The largest integer is ``max(|x|)``; NaN if an element is NaN, Inf if one is Inf.

    Args:
      x: f32, bf16 or f16[M, N]; with `make` what makes it, see `sweep.taken`.
      known: vectors for `unless`.
      unless: of references to `known`, bool[]. If it is true `x` is not read; all results are 0.
      sweep: how to walk over `x`.
      dtype: to which `x` is cast as it is read; None: it is not. Likewise below.
      make: how `x` makes the matrix, or several; None: it is the matrix itself.

    Returns:
      int32[parts()].
    """
    x, sweep = taken(x, make, sweep or both_ways(x, stages=3))
    dtype = dtype or x[0].dtype

    def kernel(x: Sequence[Ref], *refs: Ref) -> None:
        *known, amaxes = refs
        wanted = None if unless is None else jnp.logical_not(unless(*known))

        def body(i, j, tile, largest):
            largest = jnp.maximum(largest, jnp.max(magnitude(read(tile, ROWS, dtype)), axis=1))
            plgpu.commit_smem()  # read by all, before the copy engine puts the next tile there
            return largest

        found = for_each_tile(body, x, sweep=sweep, wanted=wanted, carry=no_amax(dtype, sweep))
        write_amax(amaxes, found, dtype, x, sweep)

    out = [jax.ShapeDtypeStruct((parts(),), jnp.int32)]
    (amaxes,) = run("tensor_amax", kernel, x, *known, out=out, sweep=sweep)
    return amaxes


def row_and_column_amax(
    x: jax.Array,
    *,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``max(|x|)`` of every row and of every column: (f32[M], f32[N]) of x[M, N]."""
    (m, n), dtype = x.shape, dtype or x.dtype
    sweep = sweep or fastest("row_and_column_amax", x, both_ways(x, stages=3))
    arrays, sweep = taken(x, None, sweep)
    of_rows, of_columns = sweep.shape(arrays)

    def kernel(x: Sequence[Ref], rows: Ref, columns: Ref) -> None:
        def body(i, j, tile):
            at_row, at_column = sweep.part(i, j)
            by_row = jnp.max(magnitude(read(tile, ROWS, dtype)), axis=1)
            rows[j, at_row] = f32_magnitude(by_row, dtype)
            by_column = jnp.max(magnitude(read(tile.T, COLUMNS, dtype)), axis=1)
            columns[i, at_column] = f32_magnitude(by_column, dtype)
            plgpu.commit_smem()  # as above

        for_each_tile(body, x, sweep=sweep)

    out = [
        jax.ShapeDtypeStruct((of_columns // sweep.columns, of_rows), jnp.int32),
        jax.ShapeDtypeStruct((of_rows // sweep.rows, of_columns), jnp.int32),
    ]
    how = {"out": out, "sweep": sweep}
    rows, columns = (
        lax.bitcast_convert_type(jnp.max(part, axis=0), jnp.float32)
        for part in run("row_and_column_amax", kernel, arrays, **how)
    )
    return rows[:m], columns[:n]


def quantize_tensor(
    x: Input,
    *known: jax.Array,
    fmt: Format,
    scale_of: Callable[..., tuple[jax.Array, jax.Array]],
    with_amax: bool,
    meets: int = 0,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    make: Make | None = None,
) -> tuple[jax.Array, ...]:
    """``q = cast(x / scale)``, ``q.T``, ``scale``, its products with others, the amaxes of `x`.

    Single numbers are made by this kernel: one of their own would take longer to start than to run.
    Finite values saturate; Inf and NaN become NaN.

    Args:
      x: see `tensor_amax`.
      known: vectors for `scale_of`; behind them the scales, f32[1], of operands that `x` meets.
      fmt: E4M3FN or E5M2.
      scale_of: of references to `known`: the scale and its reciprocal, as by `scale_and_inverse`,
        f32[128] of equal numbers.
      with_amax: whether to compute the amaxes as well.
      meets: how many operands `x` meets.
      sweep: how to walk over `x`.
      dtype, make: see `tensor_amax`.

    Returns:
      f8[M, N], f8[N, M], the scale f32[1], for each operand that `x` meets ``scale * its scale`` as
      by `scale_products`, f32[1], and if `with_amax` int32[parts()] as of `tensor_amax`. If several
      matrices are made, f8[M, matrices, N] and f8[matrices, N, M], with one scale.
    """
    first_met = len(known) - meets

    def prepare(known: Sequence[Ref], results: Sequence[Ref]) -> tuple[Any, Any]:
        scale, inverse = scale_of(*known[:first_met])

        @pl.when(lax.axis_index("block") == 0)
        def _():
            results[0][0] = own = jnp.max(scale)
            for factor, other in zip(results[1:], known[first_met:], strict=False):
                factor[0] = jnp.minimum(own * other[0], LARGEST_FACTOR)

        factor = jnp.max(inverse)
        return factor, factor

    out = [jax.ShapeDtypeStruct((1,), jnp.float32)] * (1 + meets)
    out += [jax.ShapeDtypeStruct((parts(),), jnp.int32)] if with_amax else []
    sweep = sweep or fastest("quantize_tensor", x, both_ways(x))
    how = (fmt, out, with_amax, sweep, dtype, make)
    return _quantize("quantize_tensor", x, known, prepare, *how)


def quantize_lines(
    x: jax.Array,
    row_inverse: jax.Array,
    column_inverse: jax.Array,
    fmt: Format,
    *,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, ...]:
    """``q = cast(x * row_inverse[:, None])`` and ``q_t = cast(x * column_inverse).T``.

    Finite values saturate; Inf and NaN become NaN.

    Args:
      x: f32, bf16 or f16[M, N].
      row_inverse: reciprocals of the scales of `q`: f32[M].
      column_inverse: those of `q_t`: f32[N].
      fmt: E4M3FN or E5M2.
      sweep: how to walk over `x`.
      dtype: see `tensor_amax`.

    Returns:
      f8[M, N] and f8[N, M].
    """
    sweep = sweep or fastest("quantize_lines", x, both_ways(x))
    inverses = padded(row_inverse, sweep.rows), padded(column_inverse, sweep.columns)
    take = lambda known, results: tuple(known)
    how = (fmt, (), False, sweep, dtype, None)
    return _quantize("quantize_lines", x, inverses, take, *how)


def _quantize(
    name: str,
    x: Input,
    known: Sequence[jax.Array],
    prepare: Callable[..., tuple[Any, Any]],
    fmt: Format,
    more: Sequence[jax.ShapeDtypeStruct],
    with_amax: bool,
    sweep: Sweep,
    dtype: jax.typing.DTypeLike | None,
    make: Make | None,
) -> tuple[jax.Array, ...]:
    """Both directions, and results of the shapes `more`, of which the last are the amaxes.

    Args:
      prepare: from references to `known` and to those results, what rows and columns are multiplied
        by: numbers, or references to vectors.
    """
    first, *_ = arrays_of(x)
    sizes, dtype = (first.shape[0], first.shape[-1]), dtype or first.dtype
    x, sweep = taken(x, make, sweep)

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
                    factor = per_line(read(factor, layout.reduce(1)), values.shape)
                return saturating(values * factor, fmt)

            at_row, at_column = sweep.part(i, j)
            values = read(tile, ROWS, dtype)
            if amax is not None:
                amax = jnp.maximum(amax, jnp.max(magnitude(values), axis=1))
            write(cast(values, row_factor, ROWS), staged, q.at[at_row, at_column])
            values = read(tile.T, COLUMNS, dtype)
            write(cast(values, column_factor, COLUMNS), staged_t, q_t.at[at_column, at_row])
            return amax

        vectors = [(v, d) for d, v in enumerate(factors) if by_line[d]]
        carry = no_amax(dtype, sweep) if with_amax else None
        amax = for_each_tile(body, x, *vectors, sweep=sweep, carry=carry)
        if with_amax:
            write_amax(results[-1], amax, dtype, x, sweep)
        finish()

    how = {"fmt": fmt, "sizes": sizes, "more": more, "sweep": sweep}
    return run_both_ways(name, kernel, x, *known, **how)
