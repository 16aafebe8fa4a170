"""On Blackwell: products of MX operands by block-scaled tensor cores, and kernels of attention."""
