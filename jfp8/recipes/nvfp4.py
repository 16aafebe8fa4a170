"""The recipe with operands in four bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.rotations import Hadamard
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe, takes
from jfp8.scaling.formats import E2M1FN

__all__ = ["NVFP4BlockScaling"]


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """4 bits: E2M1 data, an E4M3 scale for every 16 values, and one f32 scale for the tensor.

    ``S = 448 * 6 / amax(x)``, ``s_b = e4m3(amax(x_b) / 6 * S)``, and
    ``x ~= e2m1(x * S / s_b) * s_b / S``. No state. Where ``s_b`` rounds down, the largest value of
    a block saturates, by up to 6 %; stochastic rounding is unbiased for all others.

    Attributes:
      stochastic_rounding: round gradients stochastically (needs a `key`, or takes one from the
        data; see `scaled_dot_general`).
      random_hadamard: rotate both operands of wgrad by 16x16 Hadamard matrices with random signs.
      two_dimensional_weights: 16x16 blocks for `rhs`, quantized once for both directions.

    References:
      arXiv 2509.25149; Transformer Engine, ``NVFP4BlockScaling``, which rotates in bf16 (here f32).
    """

    name: ClassVar[str] = "nvfp4"

    stochastic_rounding: bool = takes(bool, True)
    random_hadamard: bool = takes(bool, True)
    two_dimensional_weights: bool = takes(bool, True)

    def products(self) -> Products:
        lhs = TwoLevel(E2M1FN, (16, 1))
        rhs = TwoLevel(E2M1FN, (16, 16) if self.two_dimensional_weights else (16, 1))
        grad = TwoLevel(
            E2M1FN, (16, 1), rounding="stochastic" if self.stochastic_rounding else "nearest_even"
        )
        return Products(
            fprop=Product(lhs, rhs, fast_accumulation=True),
            dgrad=Product(grad, rhs),
            wgrad=Product(lhs, grad, rotation=Hadamard() if self.random_hadamard else None),
        )
