"""How one operand becomes f8: `quantize`, and the quantizers that recipes are made of."""

from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.quantization import block_scale, quantize, quantize_with_scale

__all__ = [
    "Blockwise",
    "Context",
    "Current",
    "Delayed",
    "Quantizer",
    "Rowwise",
    "TwoLevel",
    "Unit",
    "block_scale",
    "quantize",
    "quantize_with_scale",
]
