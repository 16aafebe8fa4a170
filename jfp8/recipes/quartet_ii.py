"""The recipe with NVFP4 gradients that are unbiased by their scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.eden import Eden
from jfp8.quantizers.rotations import RandomHadamard
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import E2M1FN

__all__ = ["QuartetII"]

# The constant of the authors' code. What it cuts off of the largest values, scales make up for.
_TARGET = 6.0 / (17 / 16 * 0.93)


@dataclass(frozen=True, repr=False)
class QuartetII(Recipe):
    """NVFP4 with "4/6" forward, and gradients rounded by MS-EDEN: unbiased, not stochastic.

    The forward matmul is as in `NVFP4FourOverSix`, with blocks of 16 for weights, too. Both
    operands of both gradients are rotated, 128 values at a time, by a Hadamard matrix with random
    signs, drawn anew for each matmul and step, rounded to nearest, and given scales that undo the
    loss, rounded stochastically: see `quantizers.Eden`. No state.

    References:
      "Quartet II", arXiv 2601.22813, which makes the backward operands from the forward ones, as
      they were rounded (here from high precision), and the constants of its code,
      github.com/IST-DASLab/Quartet-II.
    """

    name: ClassVar[str] = "quartet_ii"

    def products(self) -> Products:
        forward = TwoLevel(E2M1FN, (16, 1), targets=(6.0, 4.0), reach=256.0 * 6.0)
        unbiased = Eden(E2M1FN, (16, 1), targets=(_TARGET,), reach=256.0 * _TARGET, group=128)
        gradient = Product(unbiased, unbiased, rotation=RandomHadamard(unbiased.group))
        return Products(Product(forward, forward, fast_accumulation=True), gradient, gradient)
