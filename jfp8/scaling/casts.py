"""Casts: round once to a format, and saturate.

Finite values beyond the range and infinities become the largest finite value; NaN stays NaN.
Hardware and compilers disagree on both (XLA's own convert turns 500 into NaN for e4m3fn and 61440
into Inf for e5m2), so nothing here relies on ``astype``: codes are made from the bits of the input,
with one rounding, and are equal on every backend.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.codes import as_float_array, codes_to_format, decode, encode
from jfp8.scaling.formats import Format, FormatLike, as_format
from jfp8.scaling.random_bits import random_bits

Rounding = Literal["nearest_even", "toward_zero", "stochastic"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)


def cast(
    x: jax.typing.ArrayLike,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> jax.Array:
    """Round `x` to `fmt` once, saturating, and store it in ``fmt.dtype``.

    ``y = clip(round(x), -max, max)``: +-Inf goes to +-max, NaN stays NaN, signed zeros are kept.
    E8M0FNU has neither sign nor zero: values below 2^-127 (zero included) go to 2^-127, negative
    ones to NaN, and ties go up, as in ml_dtypes.

    The gradient is straight-through (as for the identity). JAX gives a cotangent the dtype of its
    primal, so the gradient through `cast` is itself rounded to ``fmt.dtype``; use `round_to_format`
    where the gradient must stay exact.

    Args:
      x: ``f32 | bf16 | f16`` array of any shape (or an f8 array, whose values are exact).
      fmt: target format; or its name, such as ``"e4m3"``, or its dtype.
      rounding: ``"nearest_even"`` (ties to even), ``"toward_zero"``, or ``"stochastic"`` (rounds up
        with the probability of the remainder: unbiased for every value inside the range).
      key: JAX random key; needed by, and only used for, ``"stochastic"``.

    Returns:
      Array of ``fmt.dtype`` and the shape of `x`. (E3M4 gives codes in uint8, which have no
      gradient; ``ScaledArray(codes, 1.0).dequantize()`` turns them into values.)

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits, or `fmt` is not a format.
      ValueError: unknown `rounding` or name of a format, or ``"stochastic"`` without `key`.

    References:
      OCP OFP8 section 5.2.2 (saturating conversion).

    >>> import jax.numpy as jnp, jfp8
    >>> jfp8.cast(jnp.array([0.3, 500.0, -jnp.inf, jnp.nan]), jfp8.E4M3FN).tolist()
    [0.3125, 448.0, -448.0, nan]
    """
    fmt = as_format(fmt)
    x, bits = check_cast_arguments(x, rounding, key)
    return _cast(x, bits, fmt, rounding)


def round_to_format(
    x: jax.typing.ArrayLike,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the values of ``cast(x, fmt)``, kept in the dtype of `x` ("fake quantization").

    The gradient is straight-through and exact. NaN stays NaN for every format.

    Args:
      x: ``f32 | bf16 | f16`` array of any shape.
      fmt: target format; or its name, such as ``"e4m3"``, or its dtype.
      rounding: see `cast`.
      key: see `cast`.

    Returns:
      Array of the dtype and shape of `x` that holds only values of `fmt`.

    Raises:
      TypeError: see `cast`; also E8M0FNU from float16, which cannot hold 2^-127 or 2^16.
      ValueError: see `cast`.

    >>> import jax.numpy as jnp, jfp8
    >>> jfp8.round_to_format(jnp.array([0.3, 500.0]), jfp8.E5M2).tolist()
    [0.3125, 512.0]
    """
    fmt = as_format(fmt)
    x, bits = check_cast_arguments(x, rounding, key)
    if x.dtype == jnp.float16 and not fmt.signed:
        raise TypeError(
            f"{fmt.name} reaches from 2^-127 to 2^127, which float16 cannot hold. "
            "Convert first: x.astype(jnp.float32)."
        )
    return _round_to_format(x, bits, fmt, rounding)


def check_cast_arguments(
    x: jax.typing.ArrayLike, rounding: str, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the validated input and, for stochastic rounding, a random word per element."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is unknown. Allowed: {', '.join(ROUNDINGS)}.")
    x = as_float_array(x, "x")
    if rounding != "stochastic":
        return x, None
    if key is None:
        raise ValueError(
            "rounding='stochastic' needs random bits, but key is None. "
            "Pass key=jax.random.key(seed), a new one for every call."
        )
    return x, random_bits(key, x.shape)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cast(x: jax.Array, bits: jax.Array | None, fmt: Format, rounding: str) -> jax.Array:
    codes = encode(lax.stop_gradient(x), fmt, rounding, bits)
    return straight_through(x, codes_to_format(codes, fmt))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _round_to_format(x: jax.Array, bits: jax.Array | None, fmt: Format, rounding: str) -> jax.Array:
    source = lax.stop_gradient(x).astype(jnp.float32)
    if rounding == "nearest_even" and fmt.signed:
        rounded = round_to_grid(source, fmt)
    else:
        codes = encode(source, fmt, rounding, bits)
        # Through a format without NaN the NaN would be lost, so it is taken from the input.
        rounded = jnp.where(jnp.isnan(source), source, decode(codes_to_format(codes, fmt)))
    return straight_through(x, rounded.astype(x.dtype))


@jax.custom_jvp
def straight_through(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `y`, with the derivative of the identity in `x`."""
    return y


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    _, y = primals
    x_dot, _ = tangents
    if not jnp.issubdtype(y.dtype, jnp.floating):  # E3M4's bytes
        return y, np.zeros(y.shape, jax.dtypes.float0)
    return y, x_dot.astype(y.dtype)


def round_to_grid(x: jax.Array, fmt: Format) -> jax.Array:
    """Return values of `fmt` nearest to `x`, in f32, without leaving the float registers.

    ``(a + g) - g`` rounds ``a`` to the ulp of ``g``, nearest even; ``g`` is the power of two whose
    ulp is the step of `fmt` at ``a``. XLA does not reassociate it.
    """
    x = x.astype(jnp.float32)
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    a = jnp.minimum(jnp.abs(x), np.float32(fmt.max))  # before g is derived from it
    binade = lax.bitcast_convert_type(a, jnp.uint32) & np.uint32(0x7F800000)
    binade = jnp.maximum(binade, np.uint32((fmt.min_exponent + 127) << 23))
    g = lax.bitcast_convert_type(binade + np.uint32((23 - fmt.mantissa_bits) << 23), jnp.float32)
    rounded = lax.bitcast_convert_type((a + g) - g, jnp.uint32)
    return lax.bitcast_convert_type(rounded | (pattern & np.uint32(0x80000000)), jnp.float32)
