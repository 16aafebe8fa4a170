"""Tiles of codes and their scales, in the layouts that the kernels for TPUs read and write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # elements of a row of a register; the kernels take sizes that are multiples of it


def dequantized(codes: jax.Array, scale: jax.Array, summed: int) -> jax.Array:
    """Return codes times their scales, ``[blocks, free]``, in bf16, exact for powers of two."""
    block = codes.shape[summed] // len(scale)
    by_term = along_rows(as_f32(scale).astype(jnp.bfloat16), block)
    return codes.astype(jnp.bfloat16) * (by_term.T if summed else by_term)


def along_rows(rows: jax.Array, block: int) -> jax.Array:
    """Return each of ``rows[blocks, n]`` repeated `block` times."""
    each = [jnp.broadcast_to(rows[b : b + 1], (block, rows.shape[1])) for b in range(len(rows))]
    return jnp.concatenate(each)


def as_f32(scale: jax.Array) -> jax.Array:
    """Return scales in f32; of E8M0 codes, code 255 is NaN, and code 0 is zero, as on XLA:CPU."""
    if scale.dtype != jnp.uint8:
        return scale
    code = scale.astype(jnp.int32)
    return jnp.where(code == 255, jnp.nan, lax.bitcast_convert_type(code << 23, jnp.float32))
