"""The sink: how an amax leaves the backward pass, as the cotangent of a zero input.

JAX gives the backward pass no outputs but cotangents, and it adds cotangents, averages and rescales
them. An amax sent that way comes back as a sum or a mean. A histogram does not: the *support* of
any positive combination of one-hot vectors is the union of their bins, so the highest bin in use
still bounds the true maximum after sums over uses and devices, means over micro-batches, rescaling.

A sink is ``f32[..., 3, 2050]``: a row each for lhs, rhs and grad. In a row,
  * ``[:2048]`` counts amaxes by the leading 12 bits of their f32 pattern without the sign: eight
    bins to a power of two, so that the upper edge of a bin is at most 9/8 of what is in it; the
    last eight bins hold Inf and NaN;
  * ``[2048:]`` sums ``r`` and ``r**2``, with ``r`` in [1, 2) the mantissa of the amax. If only one
    bin is in use and ``r`` had no variance, there was a single amax (or equal ones), whatever it
    was rescaled by: it is ``mean(r) * 2^e``, exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROLES = ("lhs", "rhs", "grad")  # the rows, in order
BINS = 2048
WIDTH = BINS + 2
_SHIFT = 20  # bin = bits >> 20: the exponent and three bits of the mantissa
_FIRST_NONFINITE = 0x7F800000 >> _SHIFT
# Above the rounding of single uses (7e-7, for rescalings from 1e-7 to 1e3), and small enough that
# an average it lets pass lies within 1.4e-3 * sqrt(n - 1) of the maximum, which f8 cannot resolve.
_VARIANCE_TOLERANCE = 2e-6


def init_sink() -> jax.Array:
    """The zeros to differentiate by.

    Returns:
      A sink, f32[3, 2050].
    """
    return jnp.zeros((len(ROLES), WIDTH), jnp.float32)


def encode_amax(amax: jax.Array) -> jax.Array:
    """A row for each amax: f32[...] -> f32[..., 2050]."""
    bits = lax.bitcast_convert_type(jnp.abs(amax), jnp.uint32)[..., None]
    one_hot = _along_last(jnp.arange(BINS, dtype=jnp.uint32), bits.ndim) == bits >> _SHIFT
    r = lax.bitcast_convert_type((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000), jnp.float32)
    return jnp.concatenate([one_hot.astype(jnp.float32), r, r * r], axis=-1)


def decode_amax(row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The amax that a row holds, and whether a non-finite one was among it.

    Args:
      row: f32[..., 2050], a cotangent of a sink row after any sums, means and positive rescalings.

    Returns:
      ``(amax, overflow)``: f32[...], exact for a single use, otherwise at most 9/8 above the true
      maximum, 0 if nothing finite was seen; bool[...].
    """
    histogram, tail = row[..., :BINS], row[..., BINS:]
    used = histogram > 0
    index = _along_last(jnp.arange(BINS), row.ndim)
    finite = used & (index < _FIRST_NONFINITE)
    top = jnp.max(jnp.where(finite, index, 0), axis=-1)
    overflow = jnp.any(used & (index >= _FIRST_NONFINITE), axis=-1)

    upper_edge = ((top + 1) << _SHIFT).astype(jnp.uint32)
    upper_edge = jnp.minimum(upper_edge, np.uint32(0x7F7FFFFF))  # the last one would be Inf
    bound = lax.bitcast_convert_type(upper_edge, jnp.float32)

    count = jnp.sum(histogram, axis=-1)
    safe_count = jnp.where(count > 0, count, 1.0)
    r, r_squared = tail[..., 0] / safe_count, tail[..., 1] / safe_count
    single = jnp.sum(used, axis=-1) == 1
    single &= jnp.abs(r_squared - r * r) < _VARIANCE_TOLERANCE
    power = lax.bitcast_convert_type(((top >> 3) << 23).astype(jnp.uint32), jnp.float32)
    largest = np.float32(np.finfo(np.float32).max)
    amax = jnp.where(single, jnp.minimum(r * power, largest), bound)
    # Bins 0 to 7 hold zero and subnormals, which arithmetic flushes to zero.
    return jnp.where(top < 8, 0.0, amax), overflow


def max_of_sinks(first: jax.Array, second: jax.Array) -> jax.Array:
    """A sink that reads as the larger of two, row by row: f32[..., 3, 2050].

    Keeps the exactness that their sum would lose. Non-finite amaxes stay recorded.
    """
    (a, a_overflow), (b, b_overflow) = decode_amax(first), decode_amax(second)
    larger = jnp.maximum(a, b)
    seen = jnp.any((first + second)[..., :BINS] > 0, axis=-1)
    encoded = jnp.where(seen[..., None], encode_amax(larger), 0.0)
    nan_bin = _along_last(jnp.arange(WIDTH) == BINS - 1, first.ndim)
    return jnp.where(nan_bin & (a_overflow | b_overflow)[..., None], 1.0, encoded)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """`vector` as an array of `ndim` dimensions: nothing here relies on rank promotion."""
    return lax.expand_dims(vector, range(ndim - 1))
