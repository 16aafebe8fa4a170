"""Casts of a matrix to f8 with a scale for each block, in both directions in one pass.

For ``how`` see `quantize`; here rows and columns of tiles are multiples of the block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper import sweep
from jfp8.kernels.hopper.sweep import COLUMNS, ROWS, Input, Sweep, Walk, both_ways, fastest
from jfp8.kernels.hopper.tiles import multiprocessors
from jfp8.kernels.scales_in_kernels import bitcast, scale_and_inverse
from jfp8.kernels.shared_memory import along
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import ScaleRounding


def quantize_rows_in_blocks(
    x: Input, fmt: Format, block: int, scale_rounding: ScaleRounding, **how: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of ``1 x block`` along its rows, and `x.T` along its own rows.

    ``q[i, j] = cast(x[i, j] / s[j // block, i])`` and
    ``q_t[j, i] = cast(x[i, j] / s_t[i // block, j])``, with scales and reciprocals as in
    `quantizers.block_scale`: a block with a NaN or Inf in it becomes NaN as a whole. Blocks are
    the first dimension of the scales, so that scales of neighbouring lines are contiguous.

    `x` is f32, bf16 or f16[M, N], or the arrays it is computed from, see `Walk.over`; `block` is
    128 or 32.

    Returns:
      ``q`` f8[M, N], ``s`` [ceil(N / block), M], ``q_t`` f8[N, M], ``s_t`` [ceil(M / block), N].
      The scales are f32, or uint8 E8M0 codes if the rounding gives E8M0. If several matrices are
      computed, their number is a dimension before N, and before the one of the blocks along N.
    """
    tiles = in_blocks(x, block)
    tiles = fastest("quantize_rows_in_blocks", x, tiles) if block == 128 else tiles
    walk = Walk.over(x, tiles, **how)
    in_row, in_column = walk.sweep.columns // block, walk.sweep.rows // block  # blocks of a tile

    def kernel(x, q, q_t, s, s_t, staged, staged_t) -> None:
        def body(i, j, tile):
            def cast(values, scales, first, lines):
                # Block by block, for all lines simultaneously.
                parts = []
                for b in range(values.shape[1] // block):
                    part = values[:, b * block : (b + 1) * block]
                    amax = sweep.from_magnitude(jnp.max(sweep.magnitude(part), axis=1), walk.dtype)
                    scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
                    store(scales.at[first + b, lines], scale)
                    scaled = part.astype(jnp.float32) * along(inverse, part.shape, 0)
                    parts.append(sweep.saturating(scaled, fmt))
                return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

            at_row, at_column = walk.sweep.part(i, j)
            codes = cast(sweep.read(tile, ROWS, walk.dtype), s, j * in_row, at_row)
            sweep.write(codes, staged, q.at[at_row, at_column])
            codes = cast(sweep.read(tile.T, COLUMNS, walk.dtype), s_t, i * in_column, at_column)
            sweep.write(codes, staged_t, q_t.at[at_column, at_row])

        walk.for_each_tile(body, x)
        plgpu.wait_smem_to_gmem(0)

    scale = jnp.float32 if scale_rounding in (None, "power_of_two") else jnp.uint8
    rows, columns = walk.shape
    scales = (columns // block, rows), (rows // block, columns)
    more = [jax.ShapeDtypeStruct(shape, scale) for shape in scales]
    name = f"quantize_rows_in_blocks_{block}"
    q, q_t, s, s_t = walk.run_both_ways(name, kernel, fmt=fmt, more=more)
    m, n = walk.sizes
    across, down = -(-n // block), -(-m // block)
    return q, walk.whole(s, 0, across, m), q_t, walk.whole(s_t, 1, down, n)


def quantize_tiles(
    x: Input, fmt: Format, scale_rounding: ScaleRounding, **how: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of 128x128, which serve both directions: ``q_t`` is ``q.T``.

    `scale_rounding` is None or ``"power_of_two"``.

    Returns:
      ``q`` f8[M, N], ``q_t`` f8[N, M], scales f32[ceil(M / 128), ceil(N / 128)]. If several
      matrices are computed, see `quantize_rows_in_blocks`.
    """
    walk = Walk.over(x, fastest("quantize_tiles", x, in_blocks(x, 128)), **how)
    assert (walk.sweep.rows, walk.sweep.columns) == (128, 128)

    def kernel(x, q, q_t, s, staged, staged_t) -> None:
        def body(i, j, tile):
            values = sweep.read(tile, ROWS, walk.dtype)
            # Only reductions over one dimension at a time can be lowered.
            largest = sweep.f32_magnitude(jnp.max(sweep.magnitude(values), axis=1), walk.dtype)
            amax = bitcast(jnp.max(largest), jnp.float32)
            scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
            s[i, j] = bitcast(scale, jnp.int32)
            cast = lambda values: sweep.saturating(values.astype(jnp.float32) * inverse, fmt)

            at_row, at_column = walk.sweep.part(i, j)
            sweep.write(cast(values), staged, q.at[at_row, at_column])
            values = sweep.read(tile.T, COLUMNS, walk.dtype)
            sweep.write(cast(values), staged_t, q_t.at[at_column, at_row])

        walk.for_each_tile(body, x)
        plgpu.wait_smem_to_gmem(0)

    (m, n), (rows, columns) = walk.sizes, walk.shape
    bits = jax.ShapeDtypeStruct((rows // 128, columns // 128), jnp.int32)  # of the scales
    q, q_t, s = walk.run_both_ways("quantize_tiles", kernel, fmt=fmt, more=[bits])
    s = lax.bitcast_convert_type(s, jnp.float32)
    return q, q_t, walk.whole(s, 1, -(-m // 128), -(-n // 128))


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
