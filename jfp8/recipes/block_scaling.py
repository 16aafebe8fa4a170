"""Recipes with one scale for every block of 128 or of 32 elements."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from jfp8.matmul.spec import ACCUMULATIONS, Accumulation
from jfp8.quantizers.blocks import Blockwise
from jfp8.recipes.product import Product, Products, uniform
from jfp8.recipes.recipe import FP8_FORMATS, Fp8Format, Recipe, takes
from jfp8.scaling.scales import ScaleRounding


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(Recipe):
    """A scale per 1x128 stretch of activations and gradients, and per 128x128 tile of weights.

    ``scale_b = amax(x_b) / fmt.max`` for each block ``b``; `rhs` counts as the weight. Partial sums
    over 128 products are scaled and added in f32. No state.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"power_of_two"`` (rounded up), or ``None`` for f32 quotients.
      wgrad_tiles: activations have 128x128 tiles, too, where they are multiplied for the gradient
        of the weight. Kernels for Hopper multiply tiles faster than stretches.
      accumulation: see `Recipe`.

    References:
      DeepSeek-V3, arXiv 2412.19437 section 3.3; Transformer Engine, ``Float8BlockScaling``.
    """

    name: ClassVar[str] = "block"

    fp8_format: Fp8Format = takes(FP8_FORMATS, "E4M3")
    scale_rounding: ScaleRounding = takes((None, "power_of_two"), "power_of_two")
    _: KW_ONLY
    wgrad_tiles: bool = takes(bool, False)
    accumulation: Accumulation = takes(ACCUMULATIONS, "f32_every_128")

    def products(self) -> Products:
        forward, backward = FP8_FORMATS[self.fp8_format]
        tiles = Blockwise(forward, (128, 128), self.scale_rounding)
        grad = Blockwise(backward, (128, 1), self.scale_rounding)
        products = uniform(Blockwise(forward, (128, 1), self.scale_rounding), tiles, grad)
        return replace(products, wgrad=Product(tiles, grad)) if self.wgrad_tiles else products


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """Microscaling: an E8M0 scale, a power of two, for every 32 values along the contraction.

    ``scale_b = 2^ceil(log2(amax(x_b) / fmt.max))`` with the default rounding. A tensor is quantized
    separately, from high precision, for each direction of contraction. No state.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"rceil"`` (rounds the scale up: nothing saturates), ``"floor"`` (as in the
        OCP specification), ``"ceil"`` or ``"even"``; see `scaling.scale_from_amax`.
      two_dimensional_weights: 32x32 blocks for `rhs`, quantized once for both directions.

    References:
      OCP Microscaling Formats v1.0; arXiv 2506.08027; Transformer Engine, ``MXFP8BlockScaling``.
    """

    name: ClassVar[str] = "mxfp8"

    fp8_format: Fp8Format = takes(FP8_FORMATS, "E4M3")
    scale_rounding: ScaleRounding = takes(("rceil", "floor", "ceil", "even"), "rceil")
    two_dimensional_weights: bool = takes(bool, False)

    def products(self) -> Products:
        forward, backward = FP8_FORMATS[self.fp8_format]
        weight_block = (32, 32) if self.two_dimensional_weights else (32, 1)
        return uniform(
            Blockwise(forward, (32, 1), self.scale_rounding),
            Blockwise(forward, weight_block, self.scale_rounding),
            Blockwise(backward, (32, 1), self.scale_rounding),
        )
