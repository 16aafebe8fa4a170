"""Heads of tokens, cast to f8 in the layouts of attention's matmuls, in one pass over memory.

A projection writes ``[tokens, heads, depth]``, of which attention takes some heads, one after the
other, and each both straight and transposed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper import sweep
from jfp8.kernels.hopper.sweep import COLUMNS, ROWS, Ref, Sweep
from jfp8.kernels.shared_memory import along, swizzled
from jfp8.scaling.formats import Format

TOKENS = 128  # their multiple is the length of a sequence


def quantize_heads(
    x: jax.Array, inverse: jax.Array, *, first: int, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    """Compute ``q = cast(x * inverse)`` and ``q^T`` of heads `first`, `first` + 1, ... of a group.

    Values saturate, Inf too; NaN stays NaN. Results are f8[B, G, N, T, H] and f8[B, G, N, H, T].

    Args:
      x: f32, bf16 or f16[B, T, G, R, H], T a multiple of 128, H of 64, 128 or 256.
      inverse: reciprocals of the scales, f32[B, G, N, T], for N of the R heads of each group.
      first: of these N.
    """
    (batch, tokens, groups, of, depth), count = x.shape, inverse.shape[2]
    # Two blocks fit a multiprocessor, each with two tiles and both results.
    tiles = Sweep(rows=TOKENS if x.dtype.itemsize == 2 else TOKENS // 2, columns=min(depth, 128))
    down, across = tokens // tiles.rows, depth // tiles.columns
    total = batch * groups * count * across * down
    blocks = min(tiles.blocks, total)

    def kernel(x: Ref, inverse: Ref, q: Ref, q_t: Ref, staged: Ref, staged_t: Ref) -> None:
        block = lax.axis_index("block")
        steps = lax.div(total - 1 - block, jnp.int32(blocks)) + 1
        # The index of the head, the slice of it, and the tokens.
        place = lambda step: _unraveled(block + step * blocks, across, down)

        def of_x(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            head, part, row = place(step)
            sequence, group, n = _unraveled(head, groups, count)
            return sequence * down + row, (group * of + first + n) * across + part

        def of_inverse(step: jax.Array) -> tuple[jax.Array]:
            head, _, row = place(step)
            return (head * down + row,)

        def body(step: tuple[jax.Array], tile: Ref, factors: Ref) -> None:
            head, part, row = place(*step)
            at_token, at_depth = tiles.part(row, part)
            values = sweep.read(tile, ROWS, jnp.float32)
            by_token = along(sweep.read(factors, ROWS.reduce(1)), values.shape, 0)
            target = q.at[head, at_token, at_depth]
            sweep.write(sweep.saturating(values * by_token, fmt), staged, target)
            values = sweep.read(tile.T, COLUMNS, jnp.float32)
            by_token = along(sweep.read(factors, COLUMNS.reduce(0)), values.shape, 1)
            target = q_t.at[head, at_depth, at_token]
            sweep.write(sweep.saturating(values * by_token, fmt), staged_t, target)

        shape = (tiles.rows, tiles.columns)
        tile = plgpu.BlockSpec(shape, of_x, transforms=swizzled(x.dtype, tiles.columns))
        plgpu.emit_pipeline(
            body,
            grid=(steps,),
            in_specs=[tile, plgpu.BlockSpec((tiles.rows,), of_inverse)],
            max_concurrent_steps=tiles.stages,
        )(x, inverse)
        plgpu.wait_smem_to_gmem(0)

    heads = batch * groups * count
    shapes = (heads, tokens, depth), (heads, depth, tokens)
    q, q_t = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(s, fmt.dtype) for s in shapes),
        scratch_types=tuple(sweep.staging(tiles, fmt)),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="jfp8_quantize_heads",
    )(x.reshape(batch * tokens, -1), inverse.reshape(-1))
    each = (batch, groups, count)
    return q.reshape(*each, *shapes[0][1:]), q_t.reshape(*each, *shapes[1][1:])


def _unraveled(i: jax.Array, *sizes: int) -> list[jax.Array]:
    """Find the index of element `i` of an array whose dimensions after the first have `sizes`."""
    place = []
    for size in reversed(sizes):
        place.append(lax.rem(i, jnp.int32(size)))
        i = lax.div(i, jnp.int32(size))
    return [i, *reversed(place)]
