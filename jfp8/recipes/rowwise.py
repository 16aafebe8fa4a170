"""The recipe with one scale for every row of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.quantizer import Current
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product, Products, uniform
from jfp8.recipes.recipe import FP8_FORMATS, Fp8Format, Recipe, takes
from jfp8.scaling.scales import ScaleRounding


@dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """One scale for every row that a matmul sums over. No state.

    ``scale_i = amax_k(x_ik) / fmt.max``, along the contraction ``k`` of each matmul, so every
    tensor is quantized twice. An outlier affects only its own row.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"power_of_two"`` (rounded up), or ``None``.
      high_precision_wgrad: compute the weight gradient in high precision. In dgrad the weight then
        has one scale for the whole tensor, so that it need not be read along its other axis.

    References:
      torchao, ``float8/config.py``, ``rowwise`` and ``rowwise_with_gw_hp``.
    """

    name: ClassVar[str] = "rowwise"

    fp8_format: Fp8Format = takes(FP8_FORMATS, "E4M3")
    scale_rounding: ScaleRounding = takes((None, "power_of_two"), "power_of_two")
    high_precision_wgrad: bool = takes(bool, False)

    def products(self) -> Products:
        forward, backward = (
            Rowwise(fmt, self.scale_rounding) for fmt in FP8_FORMATS[self.fp8_format]
        )
        if not self.high_precision_wgrad:
            return uniform(forward, forward, backward)
        return Products(
            fprop=Product(forward, forward, fast_accumulation=True),
            dgrad=Product(backward, Current(forward.fmt, self.scale_rounding)),
            wgrad=Product(None, None),
        )
