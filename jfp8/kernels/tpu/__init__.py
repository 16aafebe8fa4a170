"""Pallas kernels for TPUs, and the backend that multiplies with them."""
