"""Pallas kernels for Hopper GPUs, in Mosaic GPU: only matrices, contraction last, no policy.

Kernels that quantize in blocks run on Blackwell, too. This package is imported only if one of them
is used, because JAX before 0.11.2 lacks features that they need.
"""
