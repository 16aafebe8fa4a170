"""Kernels for Blackwell: block-scaled matmuls."""
