"""Quantizers: how one operand of a matmul is quantized. Recipes are made of them."""

from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.quantization import quantize
from jfp8.scaling.scales import quantize_with_scale
from jfp8.tracing.listing import listing

__all__ = [
    "Blockwise",
    "Context",
    "Current",
    "Delayed",
    "FromForward",
    "Quantizer",
    "Rowwise",
    "TwoLevel",
    "Unit",
    "quantize",
    "quantize_with_scale",
]

__dir__ = listing(__all__)
