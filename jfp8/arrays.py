"""`ScaledArray`: stored bytes and the scale that gives them their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.formats import E8M0FNU, Format, codes_to_format, decode, encode, format_of


@partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=[])
@dataclass(frozen=True)
class ScaledArray:
    """An array in a narrow format together with its scale.

    ``x ~= data * scale``: `scale` multiplies stored bytes to give values (the reciprocal of what
    Transformer Engine, torchao and MS-AMP store).

    Invariants, checked where the array is used (a transformed pytree may hold anything):
      * ``data.dtype`` stores one of the formats of `jfp8.formats`;
      * ``scale`` is 0-d, or has ``data.ndim`` dimensions of which each divides the same dimension
        of ``data``; element ``i`` of a dimension of size ``n`` belongs to scale ``i // (n / m)``;
      * ``scale`` is float32, or E8M0FNU, or itself a `ScaledArray` (two-level scales).

    Attributes:
      data: f8 (or f4) array of any shape.
      scale: f32 or e8m0 array, or a `ScaledArray`.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(jnp.array([1.0, 2.0, 3.5]))
    >>> q.shape, q.format, q.dequantize()
    ((3,), Format(E4M3FN), Array([1. , 2. , 3.5], dtype=float32))
    """

    data: jax.Array
    scale: jax.Array | ScaledArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the values."""
        return self.data.ndim

    @property
    def format(self) -> Format:
        """Format of the stored data."""
        return format_of(self.data.dtype)

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """``data * scale`` in `dtype`; see `jfp8.dequantize`."""
        return dequantize(self, dtype)


def dequantize(q: ScaledArray, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The values ``data * scale``, multiplied in f32 and rounded once to `dtype`.

    The gradient is straight-through: the cotangent of ``data`` is that of the values, saturated and
    rounded to the stored format, because JAX gives a cotangent the dtype of its primal. The scale
    gets none. Differentiate `round_to_format` or `scaled_dot_general` where that is too coarse.

    Args:
      q: what `quantize` returned.
      dtype: floating dtype of the result.

    Returns:
      Array of `dtype` and of ``q.shape``.

    Raises:
      TypeError: `q` is no `ScaledArray`, its data is not of a known format, or `dtype` is not a
        floating dtype.
      ValueError: the shape of the scale does not divide the shape of the data.
    """
    if not isinstance(q, ScaledArray):
        raise TypeError(f"dequantize takes a ScaledArray, got {type(q).__name__}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating dtype, got {np.dtype(dtype)}.")
    return _dequantize(np.dtype(dtype), q.data, lax.stop_gradient(scale_as_f32_pair(q)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dequantize(dtype: np.dtype, data: jax.Array, scales: tuple[jax.Array, ...]) -> jax.Array:
    values = decode(data)
    for scale in scales:
        values = apply_scale(values, scale)
    return values.astype(dtype)


def _dequantize_fwd(dtype, data, scales):
    empty = jnp.zeros((0,), data.dtype)  # remembers the format
    return _dequantize(dtype, data, scales), (empty, scales)


def _dequantize_bwd(dtype, residuals, ct):
    empty, scales = residuals
    fmt = format_of(empty.dtype)
    ct_data = codes_to_format(encode(ct, fmt), fmt)
    return ct_data, jax.tree.map(jnp.zeros_like, scales)


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)


def scale_as_f32_pair(q: ScaledArray) -> tuple[jax.Array, ...]:
    """The scale of `q` as f32 factors to multiply by, one after the other.

    E8M0 scales become two powers of two: 2^-127 alone is an f32 subnormal, which XLA:CPU reads as
    zero, and so is the product of a small code with a small element.
    """
    check_scale_shape(q)
    if isinstance(q.scale, ScaledArray):
        return (dequantize(q.scale),)
    scale = jnp.asarray(q.scale)
    if scale.dtype == E8M0FNU.dtype:
        return split_e8m0(scale)
    return (scale.astype(jnp.float32),)


def split_e8m0(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """2^(c-127) = 2^a * 2^b with both factors normal; code 255 gives NaN."""
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    half = code >> 1  # c - 127 = (half - 63) + (code - half - 64)
    first = lax.bitcast_convert_type((half + np.uint32(64)) << 23, jnp.float32)
    second = lax.bitcast_convert_type((code - half + np.uint32(63)) << 23, jnp.float32)
    # XLA:CPU multiplies constant factors with each other first; the barrier keeps it from that.
    return lax.optimization_barrier((jnp.where(code == 255, jnp.nan, first), second))


def check_scale_shape(q: ScaledArray) -> None:
    """Raise unless the scale of `q` is 0-d or divides its data dimension by dimension."""
    shape, scale_shape = (
        jnp.shape(q.data),
        jnp.shape(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale),
    )
    if not scale_shape:
        return
    if len(scale_shape) != len(shape) or any(
        n % m if m else n for m, n in zip(scale_shape, shape, strict=True)
    ):
        raise ValueError(
            f"A ScaledArray with data of shape {shape} cannot have a scale of shape {scale_shape}: "
            "the scale must be 0-d, or have as many dimensions as the data, each dividing the "
            "data's. (An array that was quantized under jax.vmap has to be used under jax.vmap.)"
        )


def apply_scale(values: jax.Array, scale: jax.Array) -> jax.Array:
    """``values * scale`` with each scale element covering its block of `values`."""
    if scale.ndim == 0 or all(m in (1, n) for m, n in zip(scale.shape, values.shape, strict=True)):
        return values * scale
    blocked, expanded = [], []
    for n, m in zip(values.shape, scale.shape, strict=True):
        blocked += [m, n // max(m, 1)]
        expanded += [m, 1]
    return (values.reshape(blocked) * scale.reshape(expanded)).reshape(values.shape)
