"""The operand of a gradient as the forward product quantized it."""

from __future__ import annotations

from dataclasses import dataclass

from jfp8.quantizers.quantizer import Quantizer


@dataclass(frozen=True, repr=False)
class FromForward(Quantizer):
    """Reuse the bytes and scales of the forward product, whatever the direction of the sum.

    For ``dgrad.rhs`` and ``wgrad.lhs`` of a recipe, beside a gradient in high precision, which is
    multiplied by the dequantized values. All other quantizers start from the unquantized operand.

    Attributes:
      fmt: format of the data, that of the forward product's quantizer.
      powers_of_two: whether all scales of that quantizer's blocks are powers of two.
    """

    powers_of_two: bool = False
    one_for_both = True
