"""Storage of one moment of an optimizer between two steps.

A moment is computed in f32. Between steps it may be narrower: `Float`, `ScaledFloat16`, or FP8 in
`Blocks`. Whatever the storage, a NaN or Inf in a moment is never read back as a finite number:
elements that share a scale with a non-finite one all become NaN.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling import printing
from jfp8.scaling.random_bits import hash_bits
from jfp8.scaling.scales import amax


class HalfArray(NamedTuple):
    """Array of `ScaledFloat16`: ``x ~= data * scale``."""

    data: jax.Array  # f16
    scale: jax.Array  # f32[], a power of two; NaN if an element was not finite

    def __repr__(self) -> str:
        """Print shape and scale, not the elements."""
        return f"HalfArray({printing.array(self.data)}, scale {printing.number(self.scale)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        return self.data.shape


@dataclass(frozen=True, repr=False)
class Storage(abc.ABC):
    """A way to store an f32 array: ``decode(encode(x, seed)) ~= x``.

    Encoding is two passes over the array: `measure` reads it, and `round` uses the `scales` that
    follow. `tables` and `scales` are computed once, for all arrays of a state in few kernels.
    """

    __repr__ = printing.changes

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Measure all of `x` for the rounding of its parts, f32; by default nothing."""
        return ()

    def scales(self, measured: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Compute the numbers that `round` needs; by default what was measured.

        Args:
          measured: the result of `measure`, f32 arrays.
        """
        return measured

    @abc.abstractmethod
    def round(self, x: jax.Array, scales: tuple[jax.Array, ...], seed: jax.Array) -> Any:
        """Encode `x`, given the result of `scales`.

        Args:
          x: f32 array of any shape, or a part of the one that was measured.
          scales: the result of `scales`, arrays of any shapes.
          seed: uint32[2], see `encode`.
        """

    def tables(self, stored: Any) -> tuple[jax.Array, ...]:
        """Compute the numbers that `decode` needs from the scales alone; by default none.

        Args:
          stored: the result of `encode`.
        """
        return ()

    @abc.abstractmethod
    def decode(self, stored: Any, *tables: jax.Array) -> jax.Array:
        """Return the f32 array that `stored` stands for; the result of `tables` may be left out."""

    def holds(self, leaf: Any) -> bool:
        """Return True if a leaf of a state is a stored form; by default no array is.

        Args:
          leaf: an array, or the stored form of one.
        """
        return not jax.tree_util.all_leaves([leaf])

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        """Return the stored form of `x`.

        Args:
          x: f32 array of any shape.
          seed: uint32[2], a different one for every array and step; only read if rounding is
            stochastic. Otherwise two zeros will do.

        Returns:
          An array, or a small pytree of arrays.
        """
        return self.round(x, self.scales(self.measure(x)), seed)


@dataclass(frozen=True, repr=False)
class Float(Storage):
    """A plain array of a floating dtype of 32 or 16 bits.

    Attributes:
      dtype: float32, bfloat16 or float16. (Second moments of small gradients underflow in float16:
        see `ScaledFloat16`.)
      stochastic: round to 16 bits with the probability of the remainder instead of to nearest; this
        saturates, while to nearest gives Inf beyond the largest value.

    >>> import jax.numpy as jnp
    >>> from jfp8.optim import Float
    >>> Float(jnp.bfloat16).encode(jnp.array([1.0, 0.1]), jnp.zeros(2, jnp.uint32))
    Array([1, 0.100098], dtype=bfloat16)
    """

    dtype: Any = jnp.float32
    stochastic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))  # compares and hashes by value
        if self.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(
                f"Float(dtype={self.dtype}): must be float32, bfloat16 or float16. For 8 bits use "
                "Blocks(), whose blocks have scales."
            )
        if self.stochastic and self.dtype == jnp.float32:
            raise ValueError(
                "Float(stochastic=True) has nothing to round in float32: choose a 16-bit dtype, "
                "for example Float(jnp.bfloat16, stochastic=True)."
            )

    def round(self, x: jax.Array, scales: tuple[jax.Array, ...], seed: jax.Array) -> jax.Array:
        if self.stochastic:
            x = round_to_16_bits(x, self.dtype, hash_bits(seed, x.shape))
        return x.astype(self.dtype)

    def decode(self, stored: jax.Array, *tables: jax.Array) -> jax.Array:
        return stored.astype(jnp.float32)

    def holds(self, leaf: Any) -> bool:
        return leaf.dtype == self.dtype


@dataclass(frozen=True, repr=False)
class ScaledFloat16(Storage):
    """float16 with one power-of-two scale for the array, rounded to nearest even. ::

        s = 2^floor(log2(65504 / max|x|));   data = float16(x * s);   scale = 1 / s

    With 11 significant bits over 40 binades this is nearly exact, and an element still moves in
    steps of 0.03 %. An array of zeros has the scale 1. (MS-AMP keeps its previous scale, and after
    an infinite element takes the reciprocal of that. Here such an array reads back as NaN.)

    References:
      MS-AMP, ``msamp/common/tensor/meta.py``, which stores ``s`` as the scale.

    >>> import jax.numpy as jnp
    >>> from jfp8.optim import ScaledFloat16
    >>> kept = ScaledFloat16().encode(jnp.array([2.0**-40, 2.0**-29]), jnp.zeros(2, jnp.uint32))
    >>> kept.data.dtype, kept.data.tolist(), float(kept.scale) == 2.0**-44
    (dtype('float16'), [16.0, 32768.0], True)
    """

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return (amax(x),)

    def scales(self, measured: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (largest,) = measured
        pattern = lax.bitcast_convert_type(
            np.float32(65504.0) / jnp.where(largest > 0, largest, np.float32(65504.0)), jnp.uint32
        )
        # The exponent of the quotient, where s and 1 / s are normal.
        exponent = jnp.clip(pattern >> 23, np.uint32(1), np.uint32(253))
        s = lax.bitcast_convert_type(exponent << 23, jnp.float32)
        scale = lax.bitcast_convert_type((np.uint32(254) - exponent) << 23, jnp.float32)
        return s, jnp.where(jnp.isfinite(largest), scale, jnp.nan)

    def round(self, x: jax.Array, scales: tuple[jax.Array, ...], seed: jax.Array) -> HalfArray:
        s, scale = scales
        return HalfArray((x * s).astype(jnp.float16), scale)

    def decode(self, stored: HalfArray, *tables: jax.Array) -> jax.Array:
        return stored.data.astype(jnp.float32) * stored.scale


def round_to_16_bits(x: jax.Array, dtype: np.dtype, bits: jax.Array) -> jax.Array:
    """Round `x`, f32, stochastically to values of bf16 or f16, saturating; it stays f32.

    ``P(up) = remainder / ulp``, subnormals of f16 included. Inf and NaN stay as they are.
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = pattern & np.uint32(0x80000000), pattern & np.uint32(0x7FFFFFFF)
    drop = np.uint32(16 if dtype == jnp.bfloat16 else 13)
    mask = np.uint32((1 << drop) - 1)
    largest = np.float32(jnp.finfo(dtype).max).view(np.uint32)
    rounded = jnp.minimum((magnitude + (bits & mask)) & ~mask, largest)
    y = lax.bitcast_convert_type(sign | rounded, jnp.float32)
    if dtype == jnp.float16:  # below 2^-14 its step is fixed, at 2^-24
        smallest_normal = np.float32(2.0**-14)
        fixed = jnp.minimum(jnp.abs(x), smallest_normal) * np.float32(2.0 ** (24 + 13))
        steps = (fixed.astype(jnp.int32).astype(jnp.uint32) + (bits & mask)) >> drop
        subnormal = steps.astype(jnp.float32) * np.float32(2.0**-24)
        y = jnp.where(jnp.abs(x) < smallest_normal, jnp.copysign(subnormal, x), y)
    return jnp.where(jnp.isfinite(x), y, x)
