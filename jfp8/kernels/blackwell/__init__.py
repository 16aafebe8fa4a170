"""On Blackwell: products of operands in blocks by block-scaled tensor cores; attention."""
