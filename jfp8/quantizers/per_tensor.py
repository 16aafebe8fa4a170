"""Quantizers with one scale for a tensor: from its data, from its history, or 1."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jfp8.quantizers.quantizer import Context, Quantizer, ScalesFromData, check_has_nan
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState, history_amax
from jfp8.scaling.scales import ScaleRounding, check_scale_rounding, scale_from_amax


class _OneScale(Quantizer):
    """Whatever a product sums over, the tensor is quantized alike."""

    @property
    def one_for_both(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class Current(_OneScale, ScalesFromData):
    """Per-tensor scale from the data at hand ("dynamic", "just-in-time").

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        scale = scale_from_amax(context.amax, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)


@dataclass(frozen=True, repr=False)
class Delayed(_OneScale):
    """Per-tensor scale from the amaxes of earlier steps.

    ``scale = max(history) / fmt.max * 2^margin``, or with ``algo="most_recent"`` from the newest
    entry. Before the history has an entry it is the current amax (or the maximum of the step so
    far, if larger), so that the first step neither saturates nor flushes.

    Attributes:
      margin: powers of two of headroom.
      algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
      scale_rounding: see `scaling.scale_from_amax`.
      length: of the history, in steps.
    """

    margin: int = 0
    algo: str = "max"
    scale_rounding: ScaleRounding = None
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_has_nan(self)
        check_scale_rounding(self.scale_rounding)
        if self.algo not in ("max", "most_recent"):
            raise ValueError(f"Delayed(algo={self.algo!r}): allowed are 'max', 'most_recent'.")
        for name, least in (("margin", 0), ("length", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Delayed({name}={value!r}): must be an int of at least {least}.")

    @property
    def history_len(self) -> int:
        return self.length

    def expected(self, state: AmaxState) -> jax.Array:
        """The amax that the history in `state` predicts, f32[]; 0 if it is empty."""
        return history_amax(state["amax_history"], self.algo)

    def scale(self, observed: jax.Array, state: AmaxState | None) -> jax.Array:
        """The scale, f32[], that `state` predicts, or else that of the amax `observed`."""
        if state is not None:
            expected = self.expected(state)
            observed = jnp.where(expected > 0, expected, jnp.maximum(observed, state["amax"]))
        return scale_from_amax(
            observed, self.fmt, margin=self.margin, scale_rounding=self.scale_rounding
        )

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, self.scale(context.amax, context.state), context)


@dataclass(frozen=True, repr=False)
class Unit(_OneScale):
    """No scaling: the scale is 1, and what does not fit is lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_has_nan(self)

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        return self.data_for(x, jnp.ones((), jnp.float32), context)
