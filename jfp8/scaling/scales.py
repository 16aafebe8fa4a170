"""From data to scales, and to data with a scale: amax, the scale that follows from it, the cast.

``scale = amax / fmt.max`` maps the largest element onto the largest value of the format. Everything
here works on the bits of f32 where it can: XLA:CPU drops NaN from a float maximum and flushes
subnormals, both silently.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.arrays import ScaledArray, check_scale_shape
from jfp8.scaling.codes import (
    as_float_array,
    codes_to_format,
    convert,
    encode,
    hardware_converts,
    magnitude_bits,
    replaced_where,
)
from jfp8.scaling.formats import E8M0FNU, Format, FormatLike, as_format
from jfp8.scaling.granularity import (
    Granularity,
    PerTensor,
    check_whole_blocks,
    over_blocks,
)
from jfp8.scaling.parts import apply_scale, split_e8m0

ScaleRounding = Literal[None, "power_of_two", "rceil", "floor", "ceil", "even"]
SCALE_ROUNDINGS: tuple[str | None, ...] = get_args(ScaleRounding)

# Beyond these, the scale or its reciprocal is an f32 subnormal, which XLA:CPU takes for zero.
SMALLEST_SCALE, LARGEST_SCALE = np.float32(2.0**-126), np.float32(2.0**126)


def amax(x: jax.typing.ArrayLike, granularity: Granularity | None = None) -> jax.Array:
    """Return ``max(|x|)`` as f32: NaN or Inf if any element is, 0 for an empty array.

    The maximum is taken over the integer bit patterns without the sign, which order as
    ``finite < Inf < NaN``: one pass, exact, and it misses neither NaN nor subnormals (XLA:CPU's
    float maximum loses NaN in arrays of 4096 elements and more).

    Args:
      x: real floating array of any shape.
      granularity: the elements that share a maximum; default `PerTensor`.

    Returns:
      f32 array of the shape that ``scale_shape(granularity, x.shape)`` gives.

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits.
      ValueError: the granularity does not fit the shape of `x`.
    """
    x = as_float_array(x, "x")
    x = x.astype(jnp.float32) if x.dtype.itemsize == 1 else x
    magnitude = magnitude_bits(x)
    if granularity is None or isinstance(granularity, PerTensor):
        every = tuple(range(x.ndim))
        largest = lax.reduce_max(magnitude, every) if x.size else magnitude.dtype.type(0)
    else:
        check_whole_blocks(granularity, magnitude)
        largest = over_blocks(largest_integer, magnitude, granularity)
    return lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def largest_integer(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the maximum of unsigned integers along `axes`, 0 where there are none."""
    if 0 in x.shape:
        return jnp.max(x, axis=axes, initial=x.dtype.type(0))
    return lax.reduce_max(x, axes)


def check_scale_rounding(scale_rounding: Any) -> None:
    """Raise ``ValueError`` unless it is a `ScaleRounding`."""
    if scale_rounding not in SCALE_ROUNDINGS:
        allowed = ", ".join(repr(mode) for mode in SCALE_ROUNDINGS)
        raise ValueError(f"scale_rounding={scale_rounding!r} is unknown. Allowed: {allowed}.")


def scale_from_amax(
    amax: jax.Array,
    fmt: FormatLike,
    *,
    margin: int = 0,
    scale_rounding: ScaleRounding = None,
    poison: bool = False,
) -> jax.Array:
    """Return the scale that maps `amax` onto ``fmt.max``: ``amax / fmt.max * 2**margin``.

    The result is never 0, Inf or NaN and its reciprocal is normal, whatever `amax` is: an `amax` of
    0, Inf or NaN gives 1, and scales are kept between 2^-126 and 2^126. A non-finite `amax` gives
    NaN only with `poison`, or for a format without NaN, where only the scale can hold one.

    Args:
      amax: f32 array of any shape, not negative.
      fmt: format of the data.
      margin: powers of two of headroom.
      scale_rounding: ``None`` keeps the f32 quotient. ``"power_of_two"`` rounds it up to a power of
        two in f32, so nothing new saturates and multiplying by it is exact. The others give E8M0
        scales, the modes of the MX literature: ``"rceil"`` the same rounding up, ``"floor"``
        ``2^(floor(log2 amax) - emax)``, ``"ceil"`` ``2^(ceil(log2 amax) - emax)``, ``"even"`` the
        floor of `amax` first rounded to the format's mantissa. In these modes an `amax` of 0 gives
        code 0, and Inf and NaN give code 255 (NaN).
      poison: whether a non-finite `amax` makes the scale NaN, for the elements next to it.

    Returns:
      Array of the shape of `amax`: f32, or e8m0 for the E8M0 modes.

    Raises:
      ValueError: unknown `scale_rounding`.

    References:
      OCP Microscaling Formats v1.0 section 6.3 (floor); arXiv 2506.08027 (round up).
    """
    fmt = fmt if isinstance(fmt, Format) else as_format(fmt)
    if scale_rounding is not None:
        check_scale_rounding(scale_rounding)
    if scale_rounding not in (None, "power_of_two"):
        code = e8m0_code(amax, fmt, scale_rounding)
        code = jnp.where(code == 255, code, jnp.clip(code + margin, 0, 254))
        return codes_to_format(code.astype(jnp.uint8), E8M0FNU)
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    # True for what is not finite, and for 0, of which the difference is the largest pattern.
    has_none = bits - np.uint32(1) >= np.uint32(0x7F7FFFFF)
    if scale_rounding == "power_of_two":
        # The exponent that "rceil" finds, kept where f32 and its reciprocal are normal.
        exponent = jnp.clip(e8m0_code(amax, fmt, "rceil") + margin, 1, 253)
        scale = lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)
        scale = replaced_where(has_none, scale, np.float32(1.0))
    else:
        # XLA multiplies by the rounded reciprocal of a constant divisor, but cannot know this one.
        # XLA:CPU repeats what follows a division in each kernel that reads the scale, so that is
        # little. But the division may not come last: of 1 / (a / b), the reciprocal of the scale,
        # XLA makes b / a.
        divisor = replaced_where(has_none, jnp.full_like(amax, fmt.max), np.float32(1.0))
        scale = replaced_where(has_none, amax, np.float32(2.0**-margin)) / divisor
        scale = scale * np.float32(2.0**margin) if margin else scale
        scale = lax.clamp(SMALLEST_SCALE, scale, LARGEST_SCALE)
    if poison or not fmt.has_nan:
        scale = replaced_where(bits >= np.uint32(0x7F800000), scale, np.float32(np.nan))
    return scale


def e8m0_code(amax: jax.Array, fmt: Format, mode: str) -> jax.Array:
    """Return biased exponent (int32) of the power-of-two scale, 255 if `amax` is not finite.

    With ``amax = 2^(e-127) * (1 + t / 2^23)`` and the format's ``max = 2^emax * (1 + T / 2^23)``,
    the smallest power of two with ``amax / scale <= max`` is ``e - emax + (t > T)``: exact, and
    without a division.
    """
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    rounded = bits + np.uint32(1 << (22 - fmt.mantissa_bits)) if mode == "even" else bits
    exponent = (rounded >> 23).astype(jnp.int32)
    mantissa = bits & np.uint32(0x7FFFFF)
    max_mantissa = int(np.float32(fmt.max).view(np.uint32)) & 0x7FFFFF
    threshold = {"rceil": max_mantissa, "ceil": 0}.get(mode, 0x7FFFFF)
    above = (mantissa > np.uint32(threshold)).astype(jnp.int32)
    code = exponent - fmt.max_exponent + above
    overflow = (bits >= np.uint32(0x7F800000)) | (exponent >= 255)
    return jnp.where(overflow, 255, jnp.clip(code, 0, 254))


def reciprocal(scale: jax.Array) -> jax.Array:
    """Return ``1 / scale`` in f32, correctly rounded; `scale` is f32."""
    return np.float32(1.0) / scale


def reciprocal_factors(scale: jax.Array) -> tuple[jax.Array, ...]:
    """Return f32 factors that divide by `scale` when multiplied by one after the other.

    The reciprocal of an E8M0 code ``c`` is the code ``254 - c``, exactly; like every E8M0 scale it
    takes two factors (see `parts.split_e8m0`).
    """
    if scale.dtype != E8M0FNU.dtype:
        return (reciprocal(scale),)
    code = lax.bitcast_convert_type(scale, jnp.uint8)
    inverse = jnp.where(code == 255, code, np.uint8(254) - code)
    return split_e8m0(codes_to_format(inverse, E8M0FNU))


def quantize_with_scale(
    x: jax.Array,
    scale: jax.Array | ScaledArray,
    fmt: Format,
    rounding: str = "nearest_even",
    bits: jax.Array | None = None,
    block: tuple[int, ...] | None = None,
    inverse: jax.Array | None = None,
) -> ScaledArray:
    """Return `quantize` with a given scale, unchecked and without a gradient.

    It multiplies by an explicit reciprocal, because on some backends XLA turns a division by a
    broadcast scale into that anyway.

    Args:
      x: ``f32 | bf16 | f16`` array.
      scale: f32 or e8m0 array, or a `ScaledArray` of two levels, which needs `inverse`.
      fmt: format of the data.
      rounding: see `cast`.
      bits: u32 array of the shape of `x`, for stochastic rounding.
      block: see `ScaledArray`.
      inverse: f32 array, the reciprocals of `scale` if they are known: NaN where a block has a NaN
        or an Inf.

    Returns:
      `ScaledArray` of the shape of `x`.

    Raises:
      ValueError: the shape of `scale` does not fit `x`.
    """
    check_scale_shape(ScaledArray(x, scale, block))
    values = x.astype(jnp.float32)
    on_gpu = hardware_converts(fmt)
    if on_gpu and inverse is None:
        # NaN for Inf, which the cast would saturate. By arithmetic, and before anything else, XLA
        # does it in the pass that converts; a mask it would write to memory.
        values = values + values * np.float32(0)
    if inverse is None and scale.dtype == jnp.float32:
        inverse_of = (np.float32(1.0) / scale,)
    elif inverse is None:
        inverse_of = reciprocal_factors(scale)  # pyrefly: ignore
    else:
        inverse_of = (inverse,)
    for factor in inverse_of:
        values = apply_scale(values, factor, block) if factor.ndim else values * factor
    if not isinstance(scale, ScaledArray) and scale.dtype == E8M0FNU.dtype:
        values = _with_subnormal_inputs(values, x, scale, block)
    if hardware_converts(fmt, rounding):
        return ScaledArray(convert(values, fmt), scale, block)
    asks_x = fmt.has_nan and inverse is None and not on_gpu
    codes = encode(values, fmt, rounding, bits, finds_nan=not asks_x)
    if asks_x:
        # The cast saturates Inf; asking x itself tells it from a finite value that overflows.
        codes = lax.select(lax.is_finite(x), codes, jnp.full_like(codes, fmt.nan_code))
    return ScaledArray(codes_to_format(codes, fmt), scale, block)


def _with_subnormal_inputs(
    values: jax.Array, x: jax.Array, scale: jax.Array, block: tuple[int, ...] | None
) -> jax.Array:
    """`values` ``= x * 2^(127-c)``, where subnormal elements of `x` are taken from their integers.

    The pattern ``k`` of a subnormal is its value in units of 2^-149, so that it becomes
    ``k * 2^(-22-c)``. XLA:CPU's own product would be zero. (Only small codes matter: with more than
    ``c = 40`` even the largest subnormal is below a quarter of the smallest value of any format.)
    """
    if x.dtype.itemsize == 1 or x.dtype == jnp.float16:
        return values  # holds no subnormals of f32
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = pattern & np.uint32(0x7FFFFFFF)
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    factor = lax.bitcast_convert_type(
        (np.uint32(127 - 22) - jnp.minimum(code, np.uint32(40))) << 23, jnp.float32
    )
    factor = jnp.where(code == 255, jnp.nan, factor)
    k = jnp.minimum(magnitude, np.uint32(1 << 23)).astype(jnp.int32).astype(jnp.float32)
    from_integer = apply_scale(jnp.where(pattern == magnitude, k, -k), factor, block)
    return jnp.where(magnitude < np.uint32(1 << 23), from_integer, values)
