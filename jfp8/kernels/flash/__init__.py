"""Hold what the attention kernels for Hopper and for Blackwell do alike: all but instructions."""
