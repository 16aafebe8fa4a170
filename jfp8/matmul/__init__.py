"""Products of two `ScaledArray`s: the backends, and the one file that chooses among them."""
