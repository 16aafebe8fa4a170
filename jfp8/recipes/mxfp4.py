"""The recipe with operands in MXFP4: four bits, and powers of two as scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.rotations import RandomHadamard
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe, takes
from jfp8.scaling.formats import E2M1FN
from jfp8.scaling.scales import ScaleRounding


@dataclass(frozen=True, repr=False)
class MXFP4BlockScaling(Recipe):
    """4 bits: E2M1 data, and an E8M0 scale, a power of two, for every 32 values. No state.

    ``scale_b = 2^ceil(log2(amax(x_b) / 6))`` with the default rounding. The forward matmul rounds
    to nearest. Both gradients are unbiased estimates: their operands are rotated, 64 values at a
    time, by a Hadamard matrix with random signs, and then rounded stochastically, both of them.

    Attributes:
      scale_rounding: ``"rceil"`` (rounds the scale up: nothing saturates), ``"floor"`` (as in the
        OCP specification), ``"ceil"`` or ``"even"``; see `scaling.scale_from_amax`. With
        ``"floor"`` and ``"even"``, values saturate, and gradients are biased.
      stochastic_rounding: round both operands of dgrad and wgrad stochastically (needs a `key`, or
        takes one from the data; see `scaled_dot_general`).
      random_hadamard: rotate both operands of dgrad and wgrad.

    References:
      OCP Microscaling Formats v1.0; "Training LLMs with MXFP4", arXiv 2502.20586, which multiplies
      in bf16 or FP8 forward (as ``PerOperand(fprop="mxfp8", dgrad="mxfp4", wgrad="mxfp4")`` does),
      and prevents saturation under ``"floor"`` by a factor of 3/4 instead.
    """

    name: ClassVar[str] = "mxfp4"

    scale_rounding: ScaleRounding = takes(("rceil", "floor", "ceil", "even"), "rceil")
    stochastic_rounding: bool = takes(bool, True)
    random_hadamard: bool = takes(bool, True)

    def products(self) -> Products:
        rounding = "stochastic" if self.stochastic_rounding else "nearest_even"
        forward = Blockwise(E2M1FN, (32, 1), self.scale_rounding)
        backward = Blockwise(E2M1FN, (32, 1), self.scale_rounding, rounding=rounding)
        rotation = RandomHadamard(64) if self.random_hadamard else None
        gradient = Product(backward, backward, rotation=rotation)
        return Products(Product(forward, forward, fast_accumulation=True), gradient, gradient)
