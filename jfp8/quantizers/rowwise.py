"""The quantizer with one scale for every row of a sum."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.granularity import PerAxis
from jfp8.scaling.scales import (
    ScaleRounding,
    amax,
    check_scale_rounding,
    scale_from_amax,
)


@dataclass(frozen=True, repr=False)
class Rowwise(Quantizer):
    """One scale for every row that the product sums over ("per axis", "axiswise").

    The scales vary along all dimensions but the contracting ones, and leave the sum.

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale_rounding(self.scale_rounding)

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        kept = tuple(d for d in range(x.ndim) if d not in context.contracting)
        rows = amax(x, PerAxis(kept))
        scale = scale_from_amax(rows, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)
