"""The recipes with operands in NVFP4: four bits, and two levels of scales."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.blocks import TwoLevel
from jfp8.quantizers.rotations import Hadamard
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe, takes
from jfp8.scaling.formats import E2M1FN


@dataclass(frozen=True, repr=False)
class _NVFP4(Recipe):
    """Base of NVFP4 recipes: stochastic gradients, a rotated wgrad, weights in square blocks."""

    scaling: ClassVar[TwoLevel] = TwoLevel(E2M1FN, (16, 1))
    """The quantizer of activations, and with other blocks or rounding of all operands."""
    activations: ClassVar[TwoLevel | None] = None
    """Another quantizer for activations in the forward matmul, or None."""

    stochastic_rounding: bool = takes(bool, True)
    random_hadamard: bool = takes(bool, True)
    two_dimensional_weights: bool = takes(bool, True)

    def products(self) -> Products:
        lhs = rhs = grad = self.scaling
        if self.two_dimensional_weights:
            rhs = dataclasses.replace(rhs, block_size=(16, 16))
        if self.stochastic_rounding:
            grad = dataclasses.replace(grad, rounding="stochastic")
        return Products(
            fprop=Product(self.activations or lhs, rhs, fast_accumulation=True),
            dgrad=Product(grad, rhs),
            wgrad=Product(lhs, grad, rotation=Hadamard() if self.random_hadamard else None),
        )


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(_NVFP4):
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


@dataclass(frozen=True, repr=False)
class NVFP4FourOverSix(_NVFP4):
    """NVFP4 whose blocks end at 6 or at 4, whichever loses less ("4/6"). No state.

    E2M1 has nothing between 4 and 6, so that values just below the largest of a block lose most.
    ``S = 256 * 6 / amax(x)``, ``s_b = e4m3(amax(x_b) / t * S)`` for ``t = 6`` and ``t = 4``, and of
    the two the one with the smaller ``sum (x~ - x)^2`` over the block, after rounding to nearest;
    6 if they are equal. 256 instead of 448, because 1.5 times as much must still be an E4M3 value.
    The scale of a gradient's block is chosen in the same way, before its values are rounded
    stochastically, so that this stays unbiased.

    Attributes:
      stochastic_rounding, random_hadamard, two_dimensional_weights: see `NVFP4BlockScaling`.

    References:
      "Four Over Six", arXiv 2512.02010; github.com/mit-han-lab/fouroversix, which compares errors
      after stochastic rounding where that is used; Transformer Engine, ``nvfp4_4over6``.
    """

    name: ClassVar[str] = "nvfp4_4over6"
    scaling: ClassVar[TwoLevel] = TwoLevel(E2M1FN, (16, 1), targets=(6.0, 4.0), reach=256.0 * 6.0)


@dataclass(frozen=True, repr=False)
class NVFP4RowScaling(_NVFP4):
    """NVFP4 with an f32 scale for each row of the activations, instead of one for all. No state.

    ``S_i = 448 * 6 / amax(x_i)`` for each row ``i`` of the forward matmul's `lhs`, and all else as
    `NVFP4BlockScaling`. No result then depends on another token or sequence: it is causal and
    batch-invariant. An outlier takes no range from other rows, either.

    Attributes:
      stochastic_rounding, random_hadamard, two_dimensional_weights: see `NVFP4BlockScaling`.

    References:
      Transformer Engine, ``NVFP4BlockScaling(row_scaled_activation=True)``.
    """

    name: ClassVar[str] = "nvfp4_row"
    activations: ClassVar[TwoLevel | None] = TwoLevel(E2M1FN, (16, 1), outer="row")
