"""The sink: how an amax leaves the backward pass, as the cotangent of a zero input.

JAX gives the backward pass no outputs but cotangents, and it adds cotangents, averages and rescales
them. An amax sent that way comes back as a sum or a mean. A histogram does not: the *support* of
any positive combination of one-hot vectors is the union of their bins, so the highest bin in use
still bounds the true maximum after sums over uses and devices, means over micro-batches, and
rescaling.

A sink is ``f32[..., 3, 2050]``: a row each for lhs, rhs and grad. In a row, an amax sets
  * one of ``[:2030]``, by the leading 12 bits of its f32 pattern without the sign: eight bins to a
    power of two. The first bin holds zeros, the last one Inf and NaN;
  * in ``[2030:]`` each of its other 20 bits that is 1, the lowest first.

The highest bin in use, with the bits in use by any amax, is the largest amax itself if all are
equal, and else not below it and still in its bin: at most 9/8 of it. Neither the number of uses nor
their order or weights matter, as long as no entry of the row is flushed to zero on the way: a
factor below 2^-126 loses it in f32 or bf16, one below 2^-24 in f16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROLES = ("lhs", "rhs", "grad")  # the rows, in order
_SHIFT = 20  # bin = bits >> 20: the exponent and three bits of the mantissa
WIDTH = 2050
BINS = WIDTH - _SHIFT
# Bin 1 begins at 1.5 * 2^-126. What normal numbers there are below it share that bin: there is no
# room for separate bins.
_FIRST = (0x00C00000 >> _SHIFT) - 1
_SMALLEST_NORMAL, _INF = np.uint32(0x00800000), np.uint32(0x7F800000)

# Code that reads a sink ignores the size of its entries. Clipping by the global gradient norm does
# not, if all variables are trained as if they were parameters. So sinks of matmuls are too small to
# count there. Sinks of `Gradients`, times `SMALL`, count in no norm: the square is 0 in f32.
SINK_UNIT, SMALL = np.float32(2.0**-20), np.float32(2.0**-64)

# Facts that `decode_amax` notes of a row, above its other bits.
_POSITIVE, _NEGATIVE, _NAN = (np.uint32(1 << bit) for bit in (29, 30, 31))


def init_sink() -> jax.Array:
    """Return a sink: zeros through whose gradient the backward pass reports amaxes.

    Returns:
      f32[3, 2050], all zero.
    """
    return jnp.zeros((len(ROLES), WIDTH), jnp.float32)


def is_sink(x: jax.Array) -> bool:
    """Return True if `x` has the shape and dtype of a sink, which must not be rounded."""
    return x.shape[-2:] == (len(ROLES), WIDTH) and x.dtype == jnp.float32


def check_sink(sink: jax.Array) -> None:
    """Raise ``ValueError`` if `sink` is not what ``init_sink()`` would give."""
    if sink.shape != (len(ROLES), WIDTH) or sink.dtype != jnp.float32:
        raise ValueError(
            f"sink must be float32 zeros of shape {(len(ROLES), WIDTH)}, as made by "
            f"jfp8.scaling.init_sink(); got {sink.dtype} of shape {sink.shape}."
        )


@jax.jit
def encode_amax(amax: jax.Array) -> jax.Array:
    """Return a row for each amax: f32[...] -> f32[..., 2050]."""
    bits = lax.bitcast_convert_type(jnp.abs(amax), jnp.uint32)[..., None]
    is_zero, is_finite = bits < _SMALLEST_NORMAL, bits < _INF  # arithmetic flushes subnormals
    position = jnp.clip(bits >> _SHIFT, _FIRST + 1, _FIRST + BINS - 1) - np.uint32(_FIRST)
    position = jnp.where(is_zero, np.uint32(0), position)
    others = jnp.where(is_finite & ~is_zero, bits, np.uint32(0))
    entry = _along_last(jnp.arange(WIDTH, dtype=jnp.uint32), bits.ndim)
    shift = jnp.minimum(entry - np.uint32(BINS), np.uint32(31))  # 31, the sign, for all bins
    return ((entry == position) | (others >> shift & np.uint32(1) > 0)).astype(jnp.float32)


@jax.jit
def decode_amax(row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the amax that a row holds, and whether a non-finite one was seen.

    Args:
      row: f32[..., 2050], a cotangent of a sink row after any sums, means and rescalings, and
        negated or not. A row with entries of both signs, such as noise, says nothing.

    Returns:
      ``(amax, overflow)``: f32[...], exact for a single use and for equal ones, otherwise not below
      the true maximum and at most 9/8 of it, 0 if nothing finite was seen or the signs are mixed;
      bool[...], also True for a row that was multiplied by Inf or NaN. (Below 1.5 * 2^-126, the end
      of f32's range, the amax is at most 1.63 times the maximum, and 0 for subnormal ones.)
    """
    # NaN is neither, or a row of nothing else would be read as the largest number.
    positive, negative = row > 0, row < 0
    used = positive | negative
    entry = lax.broadcasted_iota(jnp.uint32, row.shape, row.ndim - 1)
    position = jnp.where(used & (entry < BINS - 1), entry, np.uint32(0))
    flag = jnp.where(positive, _POSITIVE, jnp.where(negative, _NEGATIVE, np.uint32(0)))
    flag = jnp.where(jnp.isnan(row), _NAN, flag)
    other = jnp.where(used & (entry >= BINS), np.uint32(1) << (entry - BINS), np.uint32(0))
    # In one pass: XLA would make the row, which may be a sum of many, anew for each of several.
    top, flags = lax.reduce(
        (position, flag | other),
        (np.uint32(0), np.uint32(0)),
        lambda a, b: (lax.max(a[0], b[0]), lax.bitwise_or(a[1], b[1])),
        (row.ndim - 1,),
    )
    unmixed = (flags & _NEGATIVE == 0) | (flags & _POSITIVE == 0)
    others = flags & np.uint32((1 << _SHIFT) - 1)
    pattern = (top + np.uint32(_FIRST)) << _SHIFT | others
    amax = lax.bitcast_convert_type(
        jnp.where(unmixed & (top > 0), pattern, np.uint32(0)), jnp.float32
    )
    return amax, (unmixed & used[..., BINS - 1]) | (flags >= _NAN)


def max_of_sinks(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return a sink that reads as the larger of two, row by row: f32[..., 3, 2050].

    Keeps the exactness that their sum would lose. Non-finite amaxes stay recorded.
    """
    (a, a_overflow), (b, b_overflow) = decode_amax(first), decode_amax(second)
    larger = jnp.maximum(a, b)
    seen = jnp.any((first + second)[..., :BINS] > 0, axis=-1)
    encoded = jnp.where(seen[..., None], encode_amax(larger), 0.0)
    nan_bin = _along_last(jnp.arange(WIDTH) == BINS - 1, first.ndim)
    return jnp.where(nan_bin & (a_overflow | b_overflow)[..., None], 1.0, encoded)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """Return `vector` as an array of `ndim` dimensions: nothing here relies on rank promotion."""
    return lax.expand_dims(vector, range(ndim - 1))
