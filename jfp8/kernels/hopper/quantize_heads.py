"""Heads of tokens, cast to f8 for attention: as its products take them, in one pass over memory.

A projection writes ``[tokens, heads, depth]``, of which attention takes some heads, one after the
other, and each both straight and transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.sweep import (
    COLUMNS,
    ROWS,
    Ref,
    Sweep,
    finish,
    per_line,
    read,
    saturating,
    staging,
    write,
)
from jfp8.kernels.shared_memory import swizzled
from jfp8.scaling.formats import Format

TOKENS = 128  # of which a sequence has a multiple
SIZES = (64, 128, 256)  # of a head


def quantize_heads(
    x: jax.Array, inverse: jax.Array, *, first: int, fmt: Format, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """``q = cast(x * inverse)`` and ``q^T`` of heads `first`, `first` + 1, ... of each group.

    Values saturate, Inf too; NaN stays NaN.

    Args:
      x: f32, bf16 or f16[B, T, G, R, H], T a multiple of 128, H of 64, 128 or 256.
      inverse: reciprocals of the scales, f32[B, G, N, T], for N of the R heads of each group.
      first: of these N.
      fmt: E4M3FN or E5M2.
      interpret: for ``plgpu.kernel``.

    Returns:
      f8[B, G, N, T, H] and f8[B, G, N, H, T].
    """
    (batch, tokens, groups, of, depth), count = x.shape, inverse.shape[2]
    # Two blocks fit a multiprocessor, each with two tiles and both results.
    sweep = Sweep(rows=TOKENS if x.dtype.itemsize == 2 else TOKENS // 2, columns=min(depth, 128))
    down, across = tokens // sweep.rows, depth // sweep.columns
    total = batch * groups * count * across * down
    blocks = min(sweep.blocks, total)

    def place(tile: jax.Array) -> tuple[jax.Array, ...]:
        """Which head of all, which part of it, and which tokens; and the head of `x`."""
        split = lambda i, n: (lax.div(i, jnp.int32(n)), lax.rem(i, jnp.int32(n)))
        head, rest = split(tile, across * down)
        part, row = split(rest, down)
        group, n = split(head, count)
        sequence, g = split(group, groups)
        return head, part, row, sequence, g * of + first + n

    def kernel(x: Ref, inverse: Ref, q: Ref, q_t: Ref, staged: Ref, staged_t: Ref) -> None:
        block = lax.axis_index("block")
        steps = lax.div(total - 1 - block, jnp.int32(blocks)) + 1

        def of_x(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            _, part, row, sequence, head = place(block + step * blocks)
            return sequence * down + row, head * across + part

        def of_inverse(step: jax.Array) -> tuple[jax.Array]:
            head, _, row, *_ = place(block + step * blocks)
            return (head * down + row,)

        def body(step: tuple[jax.Array], tile: Ref, factors: Ref) -> None:
            head, part, row, *_ = place(block + step[0] * blocks)
            at_token = pl.ds(row * sweep.rows, sweep.rows)
            at_depth = pl.ds(part * sweep.columns, sweep.columns)
            values = read(tile, ROWS, jnp.float32)
            by_token = per_line(read(factors, ROWS.reduce(1)), values.shape)
            write(
                saturating(values * by_token, fmt, interpret),
                staged,
                q.at[head, at_token, at_depth],
            )
            values = read(tile.T, COLUMNS, jnp.float32)
            by_token = lax.broadcast_in_dim(read(factors, COLUMNS.reduce(0)), values.shape, (1,))
            target = q_t.at[head, at_depth, at_token]
            write(saturating(values * by_token, fmt, interpret), staged_t, target)

        shape = (sweep.rows, sweep.columns)
        tiles = plgpu.BlockSpec(shape, of_x, transforms=swizzled(x.dtype, sweep.columns))
        plgpu.emit_pipeline(
            body,
            grid=(steps,),
            in_specs=[tiles, plgpu.BlockSpec((sweep.rows,), of_inverse)],
            max_concurrent_steps=sweep.stages,
        )(x, inverse)
        finish()

    heads = batch * groups * count
    shapes = (heads, tokens, depth), (heads, depth, tokens)
    q, q_t = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(s, fmt.dtype) for s in shapes),
        scratch_types=tuple(staging(sweep, fmt)),
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="jfp8_quantize_heads",
    )(x.reshape(batch * tokens, -1), inverse.reshape(-1))
    each = (batch, groups, count)
    return q.reshape(*each, *shapes[0][1:]), q_t.reshape(*each, *shapes[1][1:])
