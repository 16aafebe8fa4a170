"""Layouts of arrays in shared memory and in registers, for all kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.tracing.compat import kernels_are_interpreted

# Bytes that a block may use, on Hopper and on Blackwell.
SHARED_MEMORY = 232_448
COMPUTE = 2  # warpgroups of a block that multiply; the one after them copies


def swizzled(
    dtype: jax.typing.DTypeLike, columns: int
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the transforms that copies and tensor cores require of rows of `columns` elements."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def tile(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Return a tile in the layout of copies and tensor cores."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, shape[-1]))


def staging(
    rows: int, dtype: jax.typing.DTypeLike, slots: int = 1, transposed: bool = False
) -> Any:
    """Return the buffer where `rows` of results wait to be copied, for each multiplying warpgroup.

    A slot has 128 bytes of each row, the widest swizzle; or as many columns, `transposed`.
    """
    shape = rows, 128 // jnp.dtype(dtype).itemsize
    return tile((COMPUTE, slots, *(shape[::-1] if transposed else shape)), dtype)


def padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Return `x` padded with zeros, so that each dimension is a multiple of its entry."""
    missing = [(0, -n % m) for n, m in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x


def filled(x: float | jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Return f32 of this shape, all `x`."""
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)


def load(vector: Any, layout: Any) -> jax.Array:
    """Return a vector in memory, for rows or columns."""
    return plgpu.load(vector, layout=layout, optimized=False)


def release(empty: Any, cluster: bool) -> None:
    """Signal that a slot of a ring may be refilled: all warps have read, and multiplied, it.

    A warp waits only for its share of a matmul. At a block's own barrier each thread arrives; at a
    cluster's, one for all of its warpgroup. Arriving orders reads before the copy that overwrites
    them, as in CUTLASS and DeepGEMM, so no fence is needed; the interpreter asks for one.
    """
    if kernels_are_interpreted():
        plgpu.commit_smem()
    elif cluster:
        _synchronize_warpgroup()
    plgpu.barrier_arrive(empty)


@plgpu.inline_mgpu()
def _synchronize_warpgroup(_: Any) -> None:
    mosaic_gpu.warpgroup_barrier()


def along(x: Any, shape: tuple[int, ...], dimension: int) -> Any:
    """Return a matrix that repeats a vector along `dimension`, constant along the other.

    A scalar is unchanged.
    """
    return lax.broadcast_in_dim(x, shape, (dimension,)) if getattr(x, "ndim", 0) else x
