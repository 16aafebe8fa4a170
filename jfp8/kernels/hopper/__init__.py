"""Pallas kernels for Hopper GPUs, in Mosaic GPU: only matrices, contraction last, no policy.

Those that quantize in blocks run on Blackwell, too. Imported only where one of them is used,
because JAX before 0.11.2 lacks what they need.
"""
