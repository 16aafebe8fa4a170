"""`quantize`: data and the scale that brings it into the range of a format."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import Rounding, check_cast_arguments, straight_through
from jfp8.scaling.codes import codes_to_format, decode, encode
from jfp8.scaling.formats import E4M3FN, E8M0FNU, Format, FormatLike, as_format
from jfp8.scaling.granularity import Block, Granularity, PerTensor, ragged_block
from jfp8.scaling.scales import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleRounding,
    amax,
    quantize_with_scale,
    reciprocal,
    scale_from_amax,
)


def quantize(
    x: jax.typing.ArrayLike,
    fmt: FormatLike = E4M3FN,
    *,
    granularity: Granularity = PerTensor(),
    scale: jax.typing.ArrayLike | None = None,
    scale_rounding: ScaleRounding = None,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> ScaledArray:
    """Quantize: ``data = cast(x * (1 / scale), fmt)``, ``scale = amax(x) / fmt.max`` unless given.

    Elements beyond ``scale * fmt.max`` saturate. NaN and Inf do not: both become NaN in `data`, so
    that the cast hides neither. With `Block` they make the scale of their block NaN, and so all of
    its values. E2M1FN has no NaN: there they do the same to any scale that is computed, and
    saturate under a given one. The gradient is straight-through; see `dequantize` for its
    precision. (E3M4, stored in uint8, has none.)

    Args:
      x: ``f32 | bf16 | f16`` array of any shape.
      fmt: format of the data; or its name, such as ``"e4m3"``, or its dtype.
      granularity: the elements that share a scale: ``PerTensor()``, ``PerAxis(axis)`` or
        ``Block(shape)``.
      scale: use this scale instead (a "static" or "delayed" one): a positive number, or an f32 or
        e8m0 array that is 0-d or has ``x.ndim`` dimensions dividing those of `x`.
      scale_rounding: see `scaling.scale_from_amax`; ``"power_of_two"`` scales multiply exactly.
      rounding: see `cast`.
      key: see `cast`.

    Returns:
      `ScaledArray` of the shape of `x`. A zero, infinite or NaN amax gives a scale of 1.

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits; `fmt` is not a format with
        a sign; `granularity` or `scale` is of the wrong kind.
      ValueError: unknown `rounding`, `scale_rounding` or name of a format; a granularity or scale
        that does not fit the shape of `x` (blocks may be cut short at the end of a dimension, given
        scales not); both `scale` and `scale_rounding`; stochastic rounding without `key`.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(jnp.array([[1.0, -4.0], [0.5, 0.25]]), granularity=jfp8.PerAxis(0))
    >>> q.scale.shape, q.dequantize()
    ((2, 1), Array([[ 1.  , -4.  ],
           [ 0.5 ,  0.25]], dtype=float32))
    """
    fmt = as_format(fmt)
    x, bits = check_cast_arguments(x, rounding, key)
    if not fmt.signed:
        raise TypeError(
            f"{fmt.name} has no sign and no zero: it holds scales, not data. Use another format, "
            "such as jfp8.E4M3FN."
        )
    if scale is not None:
        if scale_rounding is not None:
            raise ValueError(
                f"scale_rounding={scale_rounding!r} rounds the scale that quantize computes, but "
                "scale= was given and is used unchanged. Pass one of the two."
            )
        scale = jnp.asarray(scale)
        if scale.dtype != E8M0FNU.dtype:
            if not jnp.issubdtype(scale.dtype, jnp.floating):
                raise TypeError(f"scale must be floating, got dtype {scale.dtype}.")
            scale = scale.astype(jnp.float32)
    return _quantize(x, scale, bits, fmt, granularity, scale_rounding, rounding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _quantize(x, scale, bits, fmt, granularity, scale_rounding, rounding) -> ScaledArray:
    source = lax.stop_gradient(x)
    block = inverse = None
    if isinstance(granularity, Block) and scale is None:
        scale, block, inverse = block_scale(source, fmt, granularity, scale_rounding)
    elif scale is None:
        scale = scale_from_amax(amax(source, granularity), fmt, scale_rounding=scale_rounding)
    scale = lax.stop_gradient(scale)
    q = quantize_with_scale(source, scale, fmt, rounding, bits, block, inverse)
    return ScaledArray(straight_through(x, q.data), q.scale, q.block)


def block_scale(
    x: jax.Array, fmt: Format, granularity: Block, scale_rounding: ScaleRounding = None
) -> tuple[jax.Array, tuple[int, ...] | None, jax.Array]:
    """Scale of every block by its own amax, ``amax / fmt.max``.

    A block with a NaN or an Inf in it becomes NaN as a whole: no scale fits it.

    Args:
      x: ``f32 | bf16 | f16`` array.
      fmt: format of the data.
      granularity: the blocks.
      scale_rounding: see `scaling.scale_from_amax`.

    Returns:
      ``(scale, block, inverse)``: f32 or e8m0 array; see `ScaledArray.block`; the reciprocals, f32.
    """
    scale = scale_from_amax(amax(x, granularity), fmt, scale_rounding=scale_rounding, poison=True)
    inverse = reciprocal_of_block_scale(scale)
    return scale, ragged_block(granularity, x.shape), inverse


def reciprocal_of_block_scale(scale: jax.Array) -> jax.Array:
    """Return ``1 / scale`` in f32, of f32 or e8m0 scales from `scaling.scale_from_amax`."""
    if scale.dtype != E8M0FNU.dtype:
        return reciprocal(scale)
    # No amax has a code above 253, so that the reciprocal is a normal f32.
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    inverse = lax.bitcast_convert_type((np.uint32(254) - code) << 23, jnp.float32)
    return jnp.where(code == 255, jnp.nan, inverse)


def two_level_scale(
    block_amax: jax.Array,
    fmt: Format,
    scale_fmt: Format,
    *,
    target: float | None = None,
    reach: float | None = None,
    axis: int | None = None,
) -> tuple[ScaledArray, jax.Array]:
    """Return the scales of `TwoLevel`, `scale_fmt` under f32, and what to multiply `x` by. ::

        S = reach / amax
        s = cast(block_amax / target * S, scale_fmt)

    A non-finite amax makes its block's scale NaN, and does not affect ``S``. Blocks so far
    below the amax that their scale is zero become zero.

    Args:
      target: value to scale the largest element of a block to; None means ``fmt.max``.
      reach: value to scale the amax to; None means ``scale_fmt.max * target``.
      axis: blocks along it share an ``S``; None means all do.

    Returns:
      ``(scale, inverse)``: the outer scale is f32[], or has a 1 at `axis`; f32 array.
    """
    target = fmt.max if target is None else target
    finite = jnp.isfinite(block_amax)
    largest = jnp.where(finite, block_amax, 0.0)
    largest = jnp.max(largest, axis=axis, keepdims=axis is not None, initial=0.0)
    numerator = np.float32(scale_fmt.max * target if reach is None else reach)
    encode_scale = jnp.where(largest > 0, numerator / jnp.where(largest > 0, largest, 1.0), 1.0)
    encode_scale = jnp.clip(encode_scale, SMALLEST_SCALE, LARGEST_SCALE)
    # XLA would multiply by the reciprocal of a divisor that is constant or the same for all blocks,
    # and turn 1 / (s / S) into S / s: fewer roundings than the rule has, but not everywhere. XLA
    # does not know that these values are never negative, so to it the divisors vary.
    s = block_amax / jnp.where(block_amax < 0, 1.0, np.float32(target)) * encode_scale
    narrow = codes_to_format(encode(jnp.where(finite, s, jnp.nan), scale_fmt), scale_fmt)
    s = decode(narrow)
    quotient = s / jnp.where(s < 0, 1.0, encode_scale)
    inverse = reciprocal(jnp.where(quotient < 0, 1.0, quotient))
    inverse = jnp.where(jnp.isinf(inverse), np.finfo(np.float32).max, inverse)
    return ScaledArray(narrow, reciprocal(encode_scale)), inverse
