"""Pallas kernels for Hopper GPUs, in Mosaic GPU. Matrices only, contraction last: no policy.

Imported only where one of them is used: JAX before 0.11.2 lacks what they need.
"""
