"""Differentiable products with quantized operands: fprop, dgrad and wgrad."""
