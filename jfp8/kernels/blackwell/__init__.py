"""Kernels for Blackwell: block-scaled matmuls, and attention."""
