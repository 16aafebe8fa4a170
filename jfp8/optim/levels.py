"""Magnitudes in 8 bits, in equal ratios: `Blocks` of a format without sign and mantissa.

A second moment has no sign, and only its relative error matters. So all 8 bits are one exponent::

    |x| = top * 2^((code - 254) / n)          codes 1 to 254;  0 stands for zero

where `Blocks` says how `top` and `n` follow from a block.

Stochastic rounding draws a level by the distances of the logarithms. A parameter moves by
``1 / sqrt(v)``. If ``v`` is unbiased, this is ``3/8 s^2`` too large, with ``s^2`` the relative
variance of ``v``. If its logarithm is unbiased, it is ``1/8 s^2`` too large where ``v`` decays, and
as much too small where it is steady.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.parts import apply_scale

TOP_CODE = 254
MOST_LEVELS = 128  # in a binade
# In a block. Squares of gradients that span more come from gradients that f32 could not even add.
# To represent them would cost the other elements of the block their precision.
MOST_BINADES = 48


def grid(smallest: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``top`` and ``n``, f32, of blocks with nonzero magnitudes between the two::

    n = floor(253 / binades) to three significant bits, and 128 at the most
    """
    mantissa = np.uint32(0x7FFFFF)
    bottom = lax.bitcast_convert_type(smallest, jnp.uint32) >> 23
    top = (lax.bitcast_convert_type(largest, jnp.uint32) + mantissa) >> 23
    top = jnp.clip(top, 1, 253)  # so that its reciprocal is a normal number, too
    binades = jnp.clip(top.astype(jnp.int32) - bottom.astype(jnp.int32), 1, MOST_BINADES)
    n = jnp.minimum((TOP_CODE - 1) // binades, MOST_LEVELS).astype(jnp.float32)
    n_bits = lax.bitcast_convert_type(n, jnp.uint32) & np.uint32(0xFFE00000)
    return (
        lax.bitcast_convert_type(top << 23, jnp.float32),
        lax.bitcast_convert_type(n_bits, jnp.float32),
    )


def codes(
    x: jax.Array,
    over_top: jax.Array,
    n: jax.Array,
    block: tuple[int, ...] | None,
    bits: jax.Array | None,
) -> jax.Array:
    """Encode `x`, f32, as uint8: stochastically if there are random `bits`, else to nearest.

    Only zero becomes zero: a second moment of zero next to a nonzero first one would make the
    update infinite.
    """
    relative = apply_scale(jnp.abs(x), over_top, block)
    level = np.float32(TOP_CODE) + apply_scale(jnp.log2(relative), n, block)
    add = np.float32(0.5) if bits is None else (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
    code = jnp.clip(jnp.floor(level + add), 1, TOP_CODE).astype(jnp.uint8)
    return jnp.where(jnp.abs(x) < np.float32(2.0**-126), np.uint8(0), code)


def values(
    code: jax.Array, block: tuple[int, ...] | None, top: jax.Array, over_n: jax.Array
) -> jax.Array:
    """Decode uint8 codes to f32; `over_n` is ``1 / n``."""
    level = code.astype(jnp.float32) - np.float32(TOP_CODE)
    x = apply_scale(_exp2(apply_scale(level, over_n, block)), top, block)
    return jnp.where((code == 0) & jnp.isfinite(x), np.float32(0), x)


def _exp2(x: jax.Array) -> jax.Array:
    """Compute ``2^x`` with a relative error of 3e-7, for x from -64 to 0.

    XLA:CPU would keep the result of ``jnp.exp2`` in memory, in f32, from one pass over a moment to
    the next. Sums and products it computes again.
    """
    whole = jnp.round(x)
    y = (x - whole) * np.float32(np.log(2))
    series = np.float32(1 / 720)
    for k in (120, 24, 6, 2, 1, 1):
        series = np.float32(1 / k) + y * series
    power = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return power * series
