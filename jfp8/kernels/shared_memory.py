"""Lay arrays out in the shared memory of a block, for kernels of all kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Bytes that a block may use, on Hopper and on Blackwell.
SHARED_MEMORY = 232_448


def swizzled(
    dtype: jax.typing.DTypeLike, columns: int
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the transforms that copies and tensor cores require of rows of `columns` elements."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Return `x` padded with zeros, so that each dimension is a multiple of its entry."""
    missing = [(0, -n % m) for n, m in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
