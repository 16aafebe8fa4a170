"""Compute a softmax online, block by block of keys.

Its maximum and its sum cover the keys so far. When the maximum grows, earlier sums are rescaled.
No ``[T, S]`` array is in memory. Probabilities become weights in f8: the weights of a block are
divided by the largest scale of its values, the unit of a row, by which their sums are multiplied.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.shared_memory import along

LIFT = 8  # probabilities, at most 1, are multiplied by 2^8 to be cast to e4m3fn
SMALLEST_UNIT = 2.0**-90  # since probabilities are divided by it


def raised(
    before: jax.Array, largest: jax.Array, factor: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the maximum of all keys so far, the shift of a block's logits, and the shrinkage.

    `before` is the maximum of earlier blocks, `largest` the maximum of this block's scores, and
    `unit` the largest scale of its values.
    """
    # The subtracted maximum is smaller by LIFT, which scales probabilities at no cost, and divides
    # them by the unit. For a row that has seen no key it is -inf.
    highest = jnp.maximum(before, largest * factor - np.float32(LIFT))
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    shrink = jnp.exp2(before - shift)
    # The unit is a normal power of two, the logarithm of which is exact.
    log_unit = (lax.bitcast_convert_type(unit, jnp.int32) >> 23) - 127
    return highest, shift + log_unit.astype(jnp.float32), shrink


def probabilities(x: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """Return the probabilities of scores, lifted and divided by the unit of their row."""
    return jnp.exp2(x * along(factor, x.shape, 0) - along(shift, x.shape, 0))


def ended(highest: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logarithm of the denominator, from the last maximum and sum, and its reciprocal.

    The reciprocal is arbitrary for a row without keys.
    """
    log_sum = highest * np.float32(math.log(2)) + jnp.log(sums)
    return log_sum, 1.0 / jnp.where(sums == 0, 1.0, sums)
