"""The operand of a gradient as the forward matmul quantized it."""

from __future__ import annotations

from dataclasses import dataclass

from jfp8.quantizers.quantizer import Quantizer


@dataclass(frozen=True, repr=False)
class FromForward(Quantizer):
    """Reuse the bytes and scales of the forward matmul, whatever the direction of the sum.

    For ``dgrad.rhs`` and ``wgrad.lhs`` of a recipe, next to a gradient in high precision, which is
    multiplied by the dequantized values. All other quantizers start from the unquantized operand.

    Attributes:
      fmt: format of the data, as in the forward matmul's quantizer.
      powers_of_two: whether all scales of that quantizer's blocks are powers of two.
    """

    powers_of_two: bool = False
    one_for_both = True
