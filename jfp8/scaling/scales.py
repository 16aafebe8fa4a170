"""From data to scales: which elements share one, their amax, and the scale that follows from it.

``scale = amax / fmt.max`` maps the largest element onto the largest value of the format. Everything
here works on the bits of f32 where it can: XLA:CPU drops NaN from a float maximum and flushes
subnormals, both silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.casts import as_float_array, codes_to_format, magnitude_bits
from jfp8.scaling.formats import E8M0FNU, Format, FormatLike, as_format
from jfp8.scaling.parts import split_e8m0


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array (0-d)."""


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index along `axis`: shape ``n`` there and 1 everywhere else.

    Attributes:
      axis: one axis or several, negative ones counted from the end. ``PerAxis(0)`` of an array of
        shape ``(8, 16)`` gives scales of shape ``(8, 1)``: one per row.
    """

    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
            raise TypeError(f"PerAxis takes an int or a tuple of ints, got {self.axis!r}.")


@dataclass(frozen=True)
class Block:
    """One scale per block of `shape`, which covers the trailing dimensions of the array.

    Attributes:
      shape: block sizes; ``Block((1, 128))`` of an array of shape ``(64, 256)`` gives ``(64, 2)``
        scales. Dimensions to the left of it have blocks of 1. The last block of a dimension may be
        shorter than the others; it gets the scale that padding it with zeros would give.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, tuple) or not all(isinstance(b, int) and b > 0 for b in shape):
            raise TypeError(f"Block takes a tuple of positive ints, got {shape!r}.")


Granularity: TypeAlias = PerTensor | PerAxis | Block


def scale_shape(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of an array of `shape`.

    Args:
      granularity: which elements share a scale.
      shape: of the array.

    Returns:
      ``()`` for `PerTensor`; else a tuple of the length of `shape`.

    Raises:
      ValueError: the axis does not exist, or a block has more dimensions than the array.
      TypeError: not a granularity.
    """
    ndim = len(shape)
    if isinstance(granularity, PerTensor):
        return ()
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{granularity} names an axis that an array of shape {tuple(shape)} does not "
                    f"have; allowed are {-ndim} to {ndim - 1}."
                )
        kept = {axis % ndim for axis in axes}
        return tuple(n if i in kept else 1 for i, n in enumerate(shape))
    if isinstance(granularity, Block):
        return tuple(-(-n // b) for n, b in zip(shape, block_shape(granularity, ndim), strict=True))
    raise TypeError(
        f"granularity must be PerTensor(), PerAxis(axis) or Block(shape); got {granularity!r}."
    )


def block_shape(granularity: Block, ndim: int) -> tuple[int, ...]:
    """The size of a block along each of `ndim` dimensions."""
    if len(granularity.shape) > ndim:
        raise ValueError(
            f"{granularity} has {len(granularity.shape)} dimensions, but the array only {ndim}."
        )
    return (1,) * (ndim - len(granularity.shape)) + granularity.shape


def ragged_block(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...] | None:
    """`ScaledArray.block` for an array of `shape`: None unless a block is cut short."""
    if not isinstance(granularity, Block):
        return None
    block = block_shape(granularity, len(shape))
    return block if any(n % b for n, b in zip(shape, block, strict=True)) else None


ScaleRounding = Literal[None, "power_of_two", "rceil", "floor", "ceil", "even"]
SCALE_ROUNDINGS: tuple[str | None, ...] = get_args(ScaleRounding)

# Beyond these, the scale or its reciprocal is an f32 subnormal, which XLA:CPU takes for zero.
SMALLEST_SCALE, LARGEST_SCALE = np.float32(2.0**-126), np.float32(2.0**126)


def amax(x: jax.typing.ArrayLike, granularity: Granularity | None = None) -> jax.Array:
    """``max(|x|)`` as f32; NaN if any element is NaN, Inf if any is Inf, 0 for an empty array.

    The maximum is taken over the integer bit patterns without the sign, which order as
    ``finite < Inf < NaN``: one pass, exact, and it misses neither NaN nor subnormals (XLA:CPU's
    float maximum loses NaN in arrays of 4096 elements and more).

    Args:
      x: real floating array of any shape.
      granularity: which elements share a maximum; default `PerTensor`.

    Returns:
      f32 array of the shape that ``scale_shape(granularity, x.shape)`` gives.

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits.
      ValueError: the granularity does not fit the shape of `x`.
    """
    x = as_float_array(x, "x")
    return _amax(x, PerTensor() if granularity is None else granularity)


@partial(jax.jit, static_argnums=1)
def _amax(x: jax.Array, granularity: Granularity) -> jax.Array:
    out_shape = scale_shape(granularity, x.shape)
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    magnitude = magnitude_bits(x)
    lane = magnitude.dtype.type
    if isinstance(granularity, PerTensor):
        largest = jnp.max(magnitude, initial=lane(0))
    else:
        block = ragged_block(granularity, x.shape)
        if block is not None:
            missing = [(0, -n % b) for n, b in zip(x.shape, block, strict=True)]
            magnitude = jnp.pad(magnitude, missing)
        # A dimension of size 0 has no blocks, or (PerAxis of another dimension) an empty one.
        blocked = [
            part
            for n, m in zip(magnitude.shape, out_shape, strict=True)
            for part in (m, n // m if m else 0)
        ]
        axes = tuple(range(1, 2 * x.ndim, 2))
        if blocked and blocked[-1] % 8 == 0:
            # Along the fastest dimension in two steps, the first of which XLA:CPU does in vectors.
            blocked[-1:] = [blocked[-1] // 8, 8]
            magnitude = jnp.max(magnitude.reshape(blocked), axis=axes, initial=lane(0))
            largest = jnp.max(magnitude, axis=-1, initial=lane(0))
        else:
            largest = jnp.max(magnitude.reshape(blocked), axis=axes, initial=lane(0))
    return lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


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
    """The scale that maps `amax` onto ``fmt.max``: ``amax / fmt.max * 2**margin``.

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
      poison: whether a non-finite `amax` makes the scale NaN: the elements beside it would
        otherwise be cast with a scale that has nothing to do with them.

    Returns:
      Array of the shape of `amax`: f32, or e8m0 for the E8M0 modes.

    Raises:
      ValueError: unknown `scale_rounding`.

    References:
      OCP Microscaling Formats v1.0 section 6.3 (floor); arXiv 2506.08027 (round up).
    """
    fmt = as_format(fmt)
    check_scale_rounding(scale_rounding)
    if scale_rounding not in (None, "power_of_two"):
        code = e8m0_code(amax, fmt, scale_rounding)
        code = jnp.where(code == 255, code, jnp.clip(code + margin, 0, 254))
        return codes_to_format(code.astype(jnp.uint8), E8M0FNU)
    if scale_rounding == "power_of_two":
        # The exponent that "rceil" finds, kept where f32 and its reciprocal are normal.
        exponent = jnp.clip(e8m0_code(amax, fmt, "rceil") + margin, 1, 253)
        scale = lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)
    else:
        # XLA multiplies by the rounded reciprocal of a constant divisor. It cannot see that this
        # one is constant (amax is never negative), so the quotient is correctly rounded. (It may
        # see that amax < 0 is false.) Nor may the division come last: of 1 / (a / b), where the
        # reciprocal of the scale is taken, XLA makes b / a.
        is_negative = lax.bitcast_convert_type(amax, jnp.uint32) >= np.uint32(1 << 31)
        divisor = jnp.where(is_negative, np.float32(1.0), np.float32(fmt.max))
        scale = amax / divisor * np.float32(2.0**margin)
        scale = jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    nonfinite = bits >= np.uint32(0x7F800000)
    scale = jnp.where(nonfinite, np.float32(np.nan if poison or not fmt.has_nan else 1.0), scale)
    return jnp.where(bits == 0, np.float32(1.0), scale)


def e8m0_code(amax: jax.Array, fmt: Format, mode: str) -> jax.Array:
    """Biased exponent (int32) of the power-of-two scale, 255 if `amax` is not finite.

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
    """``1 / scale`` in f32, correctly rounded; `scale` is f32."""
    return np.float32(1.0) / scale


def reciprocal_factors(scale: jax.Array) -> tuple[jax.Array, ...]:
    """f32 factors that divide by `scale` when multiplied by one after the other.

    The reciprocal of an E8M0 code ``c`` is the code ``254 - c``, exactly; like every E8M0 scale it
    takes two factors (see `parts.split_e8m0`).
    """
    if scale.dtype != E8M0FNU.dtype:
        return (reciprocal(scale),)
    code = lax.bitcast_convert_type(scale, jnp.uint8)
    inverse = jnp.where(code == 255, code, np.uint8(254) - code)
    return split_e8m0(codes_to_format(inverse, E8M0FNU))
