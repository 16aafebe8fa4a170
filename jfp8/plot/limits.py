"""Where a format begins to lose numbers."""

from __future__ import annotations

import numpy as np

from jfp8.scaling.formats import Format


def halfway_to_zero(fmt: Format) -> float:
    """Return half of the smallest value, which rounds to zero, since zero is even."""
    return fmt.smallest_subnormal / 2


def halfway_above_max(fmt: Format) -> float:
    """Return the middle of the largest value and of its successor if it had one."""
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def saturates(data: np.ndarray, fmt: Format) -> np.ndarray:
    """Decide if `data`, not negative, is too large to round to ``fmt.max``."""
    tie = halfway_above_max(fmt)
    # The tie itself goes to the even one of both codes.
    return data > tie if fmt.max_code % 2 == 0 else data >= tie
