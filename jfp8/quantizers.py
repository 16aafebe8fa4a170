"""How one operand becomes f8: `quantize`, and the quantizers that recipes are made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.arrays import ScaledArray, apply_scale, check_scale_shape
from jfp8.formats import (
    E4M3FN,
    E8M0FNU,
    Format,
    Rounding,
    check_cast_arguments,
    codes_to_format,
    encode,
    straight_through,
)
from jfp8.scaling import (
    AmaxState,
    Granularity,
    PerTensor,
    ScaleRounding,
    amax,
    history_amax,
    reciprocal_factors,
    scale_from_amax,
)


def quantize(
    x: jax.typing.ArrayLike,
    fmt: Format = E4M3FN,
    *,
    granularity: Granularity = PerTensor(),
    scale: jax.typing.ArrayLike | None = None,
    scale_rounding: ScaleRounding = None,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> ScaledArray:
    """``data = cast(x * (1 / scale), fmt)`` with ``scale = amax(x) / fmt.max`` unless it is given.

    Elements beyond ``scale * fmt.max`` saturate. NaN and Inf do not: both become NaN in `data`, so
    that neither disappears behind the cast (E2M1FN has no NaN; there a non-finite amax makes the
    scale NaN). The gradient is straight-through; see `dequantize` for its precision.

    Args:
      x: ``f32 | bf16 | f16`` array of any shape.
      fmt: format of the data.
      granularity: which elements share a scale: ``PerTensor()``, ``PerAxis(axis)`` or
        ``Block(shape)``.
      scale: use this scale instead (a "static" or "delayed" one): a positive number, or an f32 or
        e8m0 array that is 0-d or has ``x.ndim`` dimensions dividing those of `x`.
      scale_rounding: see `scaling.scale_from_amax`; ``"power_of_two"`` scales multiply exactly.
      rounding: see `cast`.
      key: see `cast`.

    Returns:
      `ScaledArray` of the shape of `x`. A zero, infinite or NaN amax gives a scale of 1.

    Raises:
      TypeError: `x` is not of a real floating dtype of at most 32 bits; `fmt` is no `Format` with a
        sign; `granularity` or `scale` is of the wrong kind.
      ValueError: unknown `rounding` or `scale_rounding`; a granularity or scale that does not fit
        the shape of `x`; both `scale` and `scale_rounding`; stochastic rounding without `key`.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(jnp.array([[1.0, -4.0], [0.5, 0.25]]), granularity=jfp8.PerAxis(0))
    >>> q.scale.shape, q.dequantize()
    ((2, 1), Array([[ 1.  , -4.  ],
           [ 0.5 ,  0.25]], dtype=float32))
    """
    x, bits = check_cast_arguments(x, fmt, rounding, key)
    if not fmt.signed:
        raise TypeError(f"{fmt.name} has no sign and no zero: it holds scales, not data.")
    if scale is not None:
        if scale_rounding is not None:
            raise ValueError(
                f"scale_rounding={scale_rounding!r} rounds the scale that quantize computes, but "
                "scale= was given and is used as it is. Pass one of the two."
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
    if scale is None:
        scale = scale_from_amax(amax(source, granularity), fmt, scale_rounding=scale_rounding)
    q = quantize_with_scale(source, lax.stop_gradient(scale), fmt, rounding, bits)
    return ScaledArray(straight_through(x, q.data), q.scale)


def quantize_with_scale(
    x: jax.Array,
    scale: jax.Array,
    fmt: Format,
    rounding: str = "nearest_even",
    bits: jax.Array | None = None,
) -> ScaledArray:
    """`quantize` with a scale at hand, unchecked and without a gradient.

    A multiplication by the explicit reciprocal, since XLA turns a division by a broadcast scale
    into one anyway, on some backends.
    """
    q = ScaledArray(x, scale)
    check_scale_shape(q)
    values = x.astype(jnp.float32)
    for factor in reciprocal_factors(scale):
        values = apply_scale(values, factor)
    codes = encode(values, fmt, rounding, bits)
    if fmt.has_nan:
        # The cast saturates Inf; asking x itself tells it from a finite value that overflows.
        codes = jnp.where(jnp.isfinite(x), codes, np.uint8(fmt.nan_code))
    return ScaledArray(codes_to_format(codes, fmt), scale)


class Quantizer(Protocol):
    """One operand's way into f8: a frozen, hashable value, equal if it quantizes alike."""

    @property
    def fmt(self) -> Format:
        """Format of the data."""
        ...

    def __call__(self, x: jax.Array, observed: jax.Array, state: AmaxState | None) -> ScaledArray:
        """Quantize `x`, whose amax is `observed`; `state` holds its history, if it has one."""
        ...


@dataclass(frozen=True)
class Current:
    """Per-tensor scale from the data at hand ("dynamic", "just-in-time")."""

    fmt: Format
    scale_rounding: ScaleRounding = None

    def __call__(self, x: jax.Array, observed: jax.Array, state: AmaxState | None) -> ScaledArray:
        scale = scale_from_amax(observed, self.fmt, scale_rounding=self.scale_rounding)
        return quantize_with_scale(x, scale, self.fmt)


@dataclass(frozen=True)
class Delayed:
    """Per-tensor scale from the amaxes of earlier steps.

    ``scale = max(history) / fmt.max * 2^margin``, or with ``algo="most_recent"`` from the newest
    entry. Before the history has an entry it is the current amax (or the maximum of the step so
    far, if larger), so that the first step neither saturates nor flushes.
    """

    fmt: Format
    margin: int = 0
    algo: str = "max"
    scale_rounding: ScaleRounding = None

    def __call__(self, x: jax.Array, observed: jax.Array, state: AmaxState | None) -> ScaledArray:
        if state is not None:
            expected = history_amax(state["amax_history"], self.algo)
            observed = jnp.where(expected > 0, expected, jnp.maximum(observed, state["amax"]))
        scale = scale_from_amax(
            observed, self.fmt, margin=self.margin, scale_rounding=self.scale_rounding
        )
        return quantize_with_scale(x, scale, self.fmt)


@dataclass(frozen=True)
class Unit:
    """No scaling: the scale is 1, and what does not fit is lost."""

    fmt: Format

    def __call__(self, x: jax.Array, observed: jax.Array, state: AmaxState | None) -> ScaledArray:
        return quantize_with_scale(x, jnp.ones((), jnp.float32), self.fmt)
