"""Draw operands whose products and sums f32 holds exactly: a wrong result is no rounding error."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BLOCK = 128


class Numbers:
    """Draw small integers and powers of two, whose products and sums f32 holds exactly."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def matrix(self, *shape, dtype=E4M3):
        return self.rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)

    def scales(self, *shape):
        return np.exp2(self.rng.integers(-3, 4, shape)).astype(np.float32)


def wide(scales, shape):
    """Return scales of blocks of 128 for every element."""
    for axis, size in enumerate(shape):
        if scales.shape[axis] != size:
            scales = np.take(scales, np.arange(size) // BLOCK, axis)
    return scales.astype(np.float64)
