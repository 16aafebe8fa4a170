"""Compute scales from amaxes inside a kernel: bitwise identical to `scaling.scale_from_amax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.formats import Format
from jfp8.scaling.scales import LARGEST_SCALE, SMALLEST_SCALE, ScaleRounding, e8m0_code

INFINITY = np.int32(0x7F800000)


def scale_and_inverse(
    amax: jax.Array,
    fmt: Format,
    scale_rounding: ScaleRounding,
    *,
    margin: int = 0,
    poison: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return the scale computed from an amax, and its reciprocal, in f32.

    Uses operations that the device computes exactly. E8M0 scales are returned as codes (uint8),
    only for `poison` without a `margin`.

    Args:
      amax: f32[n], or f32[]: kernels that compute one scale are compiled faster without arrays,
        whose layouts the compiler has to find.
      fmt, scale_rounding, margin: see `scaling.scale_from_amax`.
      poison: True if an `amax` that is not finite makes both NaN; otherwise it makes them 1.
    """
    bits = bitcast(amax, jnp.int32)
    finite = bits < INFINITY
    other = np.float32(np.nan if poison else 1)
    if scale_rounding is None:
        # If the scale would be out of range, or NaN, a number that is safe to divide by.
        divisor = fmt.max * 2.0**-margin
        smallest = max(divisor * float(SMALLEST_SCALE), np.finfo(np.float32).tiny)
        largest = min(divisor * float(LARGEST_SCALE), float(np.finfo(np.float32).max))
        one = np.float32(1.0)
        clipped = jnp.clip(jnp.where(finite, amax, one), np.float32(smallest), np.float32(largest))
        scale = jnp.where(bits == 0, one, divide(clipped, np.float32(divisor)))
        inverse = divide(one, scale)
        return jnp.where(finite, scale, other), jnp.where(finite, inverse, other)
    if scale_rounding == "power_of_two":
        code = jnp.clip(_by_array(lambda x: e8m0_code(x, fmt, "rceil"), amax) + margin, 1, 253)
        code = jnp.where(bits == 0, 127, code)
        scale, inverse = (bitcast(c << 23, jnp.float32) for c in (code, 254 - code))
        return jnp.where(finite, scale, other), jnp.where(finite, inverse, other)
    code = e8m0_code(amax, fmt, scale_rounding)
    # The reciprocal of 2^(c-127) has the code 254 - c, which is 0, an f32 subnormal, for no amax.
    inverse = bitcast((254 - code) << 23, jnp.float32)
    return code.astype(jnp.uint8), jnp.where(code == 255, np.float32(np.nan), inverse)


def divide(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """Return ``a / b`` rounded to nearest, for positive normal numbers with a normal quotient.

    The device's own division may be off by two units in the last place.
    """
    return nearest_quotient(a / b, a, b)


def nearest_quotient(y: Any, a: Any, b: Any) -> jax.Array:
    """Return the f32 nearest to ``a / b``, from a `y` off by at most three units in the last place.

    With the 24-bit mantissas ``A, B, Y`` as integers, ``Y ~ A 2^k / B`` where `k` is 23 or 24. The
    remainder ``A 2^k - B Y`` is a few times `B` at most, which survives arithmetic modulo 2^32, and
    `Y` is right once it is no larger than ``B / 2``. (A quotient never lies halfway.)
    """
    a, b, bits = (bitcast(x, jnp.int32) for x in (a, b, y))
    hidden, low = np.int32(1 << 23), np.int32((1 << 23) - 1)
    numerator, divisor = (a & low) | hidden, (b & low) | hidden
    # The quotient has the exponent e(a) - e(b), or one less if A < B; `y` may be on either side of
    # a power of two, but A and B are exact. Y counts units of that exponent's last place.
    below = (numerator < divisor).astype(jnp.int32)
    exponent = (a >> 23) - (b >> 23) - below + 127
    quotient = bits - (exponent << 23) + hidden
    remainder = (numerator << (23 + below)) - divisor * quotient
    for _ in range(3):
        step = (2 * remainder > divisor).astype(jnp.int32) - (2 * remainder < -divisor).astype(
            jnp.int32
        )
        quotient = quotient + step
        remainder = remainder - step * divisor
    return bitcast(quotient - hidden + (exponent << 23), jnp.float32)


def bitcast(x: jax.Array | np.generic, dtype: jax.typing.DTypeLike) -> Any:
    """Return `x` with its bits read as another type of the same width."""
    if isinstance(x, np.generic):
        return x.view(dtype)
    return _by_array(lambda x: lax.bitcast_convert_type(x, dtype), x)


def _by_array(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return ``f(x)``; kernels for GPUs can bitcast arrays, but not scalars."""
    return f(x) if x.ndim else jnp.max(f(jnp.full((128,), x)))
