"""Products of MX operands by the block-scaled tensor cores of Blackwell."""
