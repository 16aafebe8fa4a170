"""The quantizer with one scale for every row of a sum."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jfp8.quantizers.quantizer import Along, Context, ScalesFromData
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.granularity import PerAxis
from jfp8.scaling.scales import amax, scale_from_amax


@dataclass(frozen=True, repr=False)
class Rowwise(ScalesFromData):
    """One scale for every row that the matmul sums over ("per axis", "axiswise").

    ``scale = amax(row) / fmt.max``. The scales vary along all dimensions except the contracting
    ones, and so are applied after the sum.

    Attributes:
      scale_rounding: see `scaling.scale_from_amax`.
    """

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        del history
        return frozenset(("contracting",))

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        kept = tuple(d for d in range(x.ndim) if d not in context.contracting)
        rows = amax(x, PerAxis(kept))
        scale = scale_from_amax(rows, self.fmt, scale_rounding=self.scale_rounding)
        return self.data_for(x, scale, context)
