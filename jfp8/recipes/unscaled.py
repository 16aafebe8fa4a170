"""The recipe without any scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.quantizer import Unit
from jfp8.recipes.product import Products, uniform
from jfp8.recipes.recipe import FP8_FORMATS, Fp8Format, Recipe, takes


@dataclass(frozen=True, repr=False)
class Unscaled(Recipe):
    """FP8 without any scale: every operand is cast unchanged. No state.

    Gradients below 2^-17 (e5m2) vanish and values above 448 (e4m3) saturate, unless loss scaling
    keeps them in range. It serves as a control that shows what scaling is for.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
    """

    name: ClassVar[str] = "unscaled"
    needs_loss_scale: ClassVar[bool] = True

    fp8_format: Fp8Format = takes(FP8_FORMATS, "HYBRID")

    def products(self) -> Products:
        forward, backward = (Unit(fmt) for fmt in FP8_FORMATS[self.fp8_format])
        return uniform(forward, forward, backward)
