"""Choose the scale of a block for which rounding to E2M1 has the least error."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of, codes_to_format, decode, encode
from jfp8.scaling.formats import E2M1FN
from jfp8.scaling.granularity import Block, over_blocks, ragged_block
from jfp8.scaling.parts import apply_scale

# Errors are counted in units of 2^-14 of the scale, and are at most 3 * 2^14 of them: half a step
# of E2M1, or what saturates under a scale that was rounded down from up to 1.5 times its size. So
# their squares fit into 32 bits, and so do the sums of both halves of as many squares as this.
_UNIT = np.float32(2.0**14)
LARGEST_COMPARED = 256


def with_least_error(
    x: jax.Array,
    candidates: Sequence[tuple[ScaledArray, jax.Array]],
    granularity: Block,
) -> tuple[ScaledArray, jax.Array]:
    """Return the candidate with the smallest ``sum((q * s - x)^2)`` of each block, or the first.

    Errors are rounded to 2^-14 of the scale, and added as integers. A sum in f32 would depend on
    its order, and with it the bytes on the device. Candidates are from `two_level_scale`, differ in
    the inner scales only, and have blocks of at most `LARGEST_COMPARED` elements.
    """
    best, *others = candidates
    if not others:
        return best
    least = _squared_error(x, *best, granularity)
    for scale, inverse in others:
        error = _squared_error(x, scale, inverse, granularity)
        better = error < least
        least = jnp.where(better, error, least)
        codes = jnp.where(better, codes_of(scale.data), codes_of(best[0].data))
        narrow = codes_to_format(codes, scale.format)
        best = (
            ScaledArray(narrow, scale.scale),
            jnp.where(better, inverse, best[1]),
        )
    return best


def _squared_error(
    x: jax.Array, scale: ScaledArray, inverse: jax.Array, granularity: Block
) -> jax.Array:
    """The sum of each block, f32, in units of ``(2^-14 * outer scale)^2``; Inf if its s is 0."""
    values = apply_scale(x.astype(jnp.float32), inverse, ragged_block(granularity, x.shape))
    stored = decode(codes_to_format(encode(values, E2M1FN), E2M1FN))
    # In integers, before they are subtracted: compilers may fuse a product with a difference.
    error = _units(values) - _units(stored)
    squares = lax.bitcast_convert_type(error, jnp.uint32)
    squares = squares * squares
    high, low = (over_blocks(_sum, part, granularity) for part in (squares >> 16, squares & 0xFFFF))
    total = high.astype(jnp.float32) * 2.0**16 + low.astype(jnp.float32)
    s = decode(scale.data)
    # Under a scale of 0 all elements are lost, whatever they are; no candidate is worse.
    return jnp.where(s > 0, total * (s * s), jnp.inf)


def _units(values: jax.Array) -> jax.Array:
    return lax.round(values * _UNIT, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)


def _sum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(x, axis=axes, dtype=x.dtype)
