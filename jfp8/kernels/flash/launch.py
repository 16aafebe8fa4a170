"""Pad operands, and launch a kernel over all tiles of all heads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.problem import BLOCK, Problem
from jfp8.kernels.flash.ring import BY_TOKEN
from jfp8.kernels.flash.tile_work import TileWork, work_on_tile
from jfp8.kernels.shared_memory import COMPUTE, padded

# No barriers except explicit ones, as for matmuls: see `tiles.NO_OTHER_BARRIERS`. A warp writes
# and multiplies its own rows. exp2 is one instruction, with an error of at most 2^-22.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


def launch(
    work: type[TileWork],
    p: Problem,
    operands: dict[str, jax.Array],
    heads: int,
    out_dtype: jax.typing.DTypeLike,
) -> list[jax.Array]:
    """Return ``out_dtype[batches, tokens, heads, size]``, and another or ``f32[heads, tokens]``.

    `operands` have all heads concatenated; `heads` is the number of `work.like` in one batch.
    """
    n, tokens, _ = operands[work.like].shape
    matrix = jax.ShapeDtypeStruct((n // heads, tokens, heads, p.size), out_dtype)
    vector = jax.ShapeDtypeStruct((n, tokens), jnp.float32)
    return plgpu.kernel(
        functools.partial(work_on_tile, work, p, tuple(operands)),
        out_type=[matrix, vector if work.like == "q" else matrix],
        grid=(n // heads, heads * (tokens // work.tokens)),
        grid_names=("batch", "tile"),
        cluster=(1,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=work.scratch(p, operands, out_dtype),
        compiler_params=PARAMS,
        kernel_name=f"jfp8_{work.name}",
    )(*operands.values())


def padded_operand(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return ``[heads, tokens, size]``, transposed if the name is ``_t``; scales without `size`."""
    tokens = BLOCK if name[0] in "kv" else tile
    x = x.reshape(-1, *x.shape[-1 if name.endswith("_scale") else -2 :])
    return padded(x, 1, tokens, 1) if name in BY_TOKEN else padded(x, *(1,) * (x.ndim - 1), tokens)
