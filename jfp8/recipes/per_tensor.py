"""Recipes with one scale for a tensor: delayed and current scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jfp8.quantizers.quantizer import Current, Delayed
from jfp8.recipes.product import Products, uniform
from jfp8.recipes.recipe import FP8_FORMATS, Fp8Format, Recipe, takes
from jfp8.scaling.scales import ScaleRounding


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor scales from an amax history: one pass over each tensor.

    ``scale = max(amax_history) / fmt.max * 2^margin``, where the history holds the amax of each of
    the last `amax_history_len` optimizer steps. Without state it uses current scaling, and for a
    weight where no gradient is taken.

    Attributes:
      margin: powers of two of headroom between the history's maximum and the format's.
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      amax_history_len: number of steps that the history remembers.
      amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
      scale_rounding: ``None``, or ``"power_of_two"`` (rounded up).

    References:
      Transformer Engine, ``common/recipe``, ``DelayedScaling``; arXiv 2209.05433.
    """

    name: ClassVar[str] = "delayed"

    margin: int = takes(range(33), 0)
    fp8_format: Fp8Format = takes(FP8_FORMATS, "HYBRID")
    amax_history_len: int = takes(range(1, (1 << 20) + 1), 16)
    amax_compute_algo: Literal["max", "most_recent"] = takes(("max", "most_recent"), "max")
    scale_rounding: ScaleRounding = takes((None, "power_of_two"), None)

    def products(self) -> Products:
        forward, backward = (
            Delayed(
                fmt,
                margin=self.margin,
                algo=self.amax_compute_algo,
                scale_rounding=self.scale_rounding,
                length=self.amax_history_len,
            )
            for fmt in FP8_FORMATS[self.fp8_format]
        )
        return uniform(forward, forward, backward)


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself: ``scale = amax(x) / fmt.max``. No state.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      scale_rounding: ``None``, or ``"power_of_two"`` (rounded up).

    References:
      Transformer Engine, ``common/recipe``, ``Float8CurrentScaling``.
    """

    name: ClassVar[str] = "current"

    fp8_format: Fp8Format = takes(FP8_FORMATS, "HYBRID")
    scale_rounding: ScaleRounding = takes((None, "power_of_two"), None)

    def products(self) -> Products:
        forward, backward = (
            Current(fmt, self.scale_rounding) for fmt in FP8_FORMATS[self.fp8_format]
        )
        return uniform(forward, forward, backward)
