"""Casts of a matrix to f8 with a scale for each block, in both directions in one pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.sweep import (
    COLUMNS,
    ROWS,
    Input,
    Make,
    Sweep,
    arrays_of,
    both_ways,
    bytes_read,
    f32_magnitude,
    fastest,
    finish,
    for_each_tile,
    from_magnitude,
    magnitude,
    per_line,
    read,
    run_both_ways,
    saturating,
    taken,
    whole,
    write,
)
from jfp8.kernels.hopper.tiles import multiprocessors
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import ScaleRounding


def quantize_rows_in_blocks(
    x: Input,
    fmt: Format,
    block: int,
    scale_rounding: ScaleRounding,
    *,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    make: Make | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of ``1 x block`` along its rows, and `x.T` along its own rows.

    ``q[i, j] = cast(x[i, j] / s[j // block, i])`` and
    ``q_t[j, i] = cast(x[i, j] / s_t[i // block, j])``, where scales and their reciprocals are those
    of `quantizers.block_scale`: a block with a NaN or Inf in it becomes NaN as a whole. Blocks are
    the first dimension of the scales, so that scales of neighbouring lines are side by side.

    Args:
      x: f32, bf16 or f16[M, N]; with `make` what makes it, see `sweep.taken`.
      fmt: E4M3FN or E5M2.
      block: 128 or 32.
      scale_rounding: see `scaling.scale_from_amax`.
      sweep: how to walk over `x`; rows and columns are multiples of `block`.
      dtype, make: see `quantize.tensor_amax`.

    Returns:
      ``q`` f8[M, N], ``s`` [ceil(N / block), M], ``q_t`` f8[N, M], ``s_t`` [ceil(M / block), N].
      The scales are f32, or uint8 E8M0 codes where the rounding gives E8M0. If several matrices are
      made, their number is a dimension before N, and before that of the blocks along N.
    """
    first, *_ = arrays_of(x)
    m, n, dtype = first.shape[0], first.shape[-1], dtype or first.dtype
    if sweep is None:
        sweep = in_blocks(x, block)
        sweep = fastest("quantize_rows_in_blocks", x, sweep) if block == 128 else sweep
    assert sweep.rows % block == sweep.columns % block == 0
    x, sweep = taken(x, make, sweep)
    rows, columns = sweep.shape(x)

    def kernel(x, q, q_t, s, s_t, staged, staged_t) -> None:
        def body(i, j, tile):
            def cast(values, scales, first, lines):
                # Block by block, for all lines at once.
                parts = []
                for b in range(values.shape[1] // block):
                    part = values[:, b * block : (b + 1) * block]
                    amax = from_magnitude(jnp.max(magnitude(part), axis=1), dtype)
                    scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
                    store(scales.at[first + b, lines], scale)
                    scaled = part.astype(jnp.float32) * per_line(inverse, part.shape)
                    parts.append(saturating(scaled, fmt))
                return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

            at_row, at_column = sweep.part(i, j)
            codes = cast(read(tile, ROWS, dtype), s, j * (sweep.columns // block), at_row)
            write(codes, staged, q.at[at_row, at_column])
            codes = cast(read(tile.T, COLUMNS, dtype), s_t, i * (sweep.rows // block), at_column)
            write(codes, staged_t, q_t.at[at_column, at_row])

        for_each_tile(body, x, sweep=sweep)
        finish()

    scale = jnp.float32 if scale_rounding in (None, "power_of_two") else jnp.uint8
    scales = (columns // block, rows), (rows // block, columns)
    q, q_t, s, s_t = run_both_ways(
        f"quantize_rows_in_blocks_{block}",
        kernel,
        x,
        fmt=fmt,
        sizes=(m, n),
        more=[jax.ShapeDtypeStruct(shape, scale) for shape in scales],
        sweep=sweep,
    )
    across, down = -(-n // block), -(-m // block)
    return q, whole(s, sweep, 0, across, m), q_t, whole(s_t, sweep, 1, down, n)


def quantize_tiles(
    x: Input,
    fmt: Format,
    scale_rounding: ScaleRounding,
    *,
    sweep: Sweep | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    make: Make | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of 128x128, which serve both directions: ``q_t`` is ``q.T``.

    Args:
      x: f32, bf16 or f16[M, N]; with `make` what makes it, see `sweep.taken`.
      fmt: E4M3FN or E5M2.
      scale_rounding: None or ``"power_of_two"``.
      sweep: how to walk over `x`, in tiles of 128x128.
      dtype, make: see `quantize.tensor_amax`.

    Returns:
      ``q`` f8[M, N], ``q_t`` f8[N, M], scales f32[ceil(M / 128), ceil(N / 128)]. If several
      matrices are made, see `quantize_rows_in_blocks`.
    """
    first, *_ = arrays_of(x)
    m, n, dtype = first.shape[0], first.shape[-1], dtype or first.dtype
    sweep = sweep or fastest("quantize_tiles", x, in_blocks(x, 128))
    assert (sweep.rows, sweep.columns) == (128, 128)
    x, sweep = taken(x, make, sweep)
    rows, columns = sweep.shape(x)

    def kernel(x, q, q_t, s, staged, staged_t) -> None:
        def body(i, j, tile):
            values = read(tile, ROWS, dtype)
            # Only reductions over one dimension at a time and bitcasts of vectors can be lowered.
            largest = f32_magnitude(jnp.max(magnitude(values), axis=1), dtype)
            amax = lax.bitcast_convert_type(jnp.full((128,), jnp.max(largest)), jnp.float32)
            scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
            s[i, j] = jnp.max(lax.bitcast_convert_type(scale, jnp.int32))

            def cast(values):
                scaled = values.astype(jnp.float32) * per_line(inverse, values.shape)
                return saturating(scaled, fmt)

            at_row, at_column = sweep.part(i, j)
            write(cast(values), staged, q.at[at_row, at_column])
            write(cast(read(tile.T, COLUMNS, dtype)), staged_t, q_t.at[at_column, at_row])

        for_each_tile(body, x, sweep=sweep)
        finish()

    q, q_t, s = run_both_ways(
        "quantize_tiles",
        kernel,
        x,
        fmt=fmt,
        sizes=(m, n),
        more=[jax.ShapeDtypeStruct((rows // 128, columns // 128), jnp.int32)],  # bits of the scales
        sweep=sweep,
    )
    s = whole(lax.bitcast_convert_type(s, jnp.float32), sweep, 1, -(-m // 128), -(-n // 128))
    return q, q_t, s


def in_blocks(x: Input, block: int) -> Sweep:
    """Tiles of whole blocks in both directions, of which two fit a multiprocessor; for f32 one.

    One block, if its tiles are so large that two do not fit.
    """
    read = bytes_read(x)
    if block != 128 or read < 4:
        return both_ways(x)
    return Sweep(stages=1) if read == 4 else Sweep(stages=12 // read, blocks=multiprocessors())


def store(ref: Any, values: jax.Array) -> None:
    """``ref[...] = values``; JAX 0.12 must be told that single bytes are meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
