"""Products of operands in blocks by the block-scaled tensor cores of Blackwell."""
