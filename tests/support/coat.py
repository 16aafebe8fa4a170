"""The oracle of COAT's expansion of moments, in float64."""

import numpy as np


def cast(x, fmt) -> np.ndarray:
    return np.clip(x, -fmt.max, fmt.max).astype(fmt.dtype)


def coat(part: np.ndarray, fmt):
    """COAT's expansion of a block in float64: codes, values and k, which is bounded; zeros stay."""
    a = np.abs(part.astype(np.float64))
    # The two that jfp8 keeps: outwards to bf16.
    largest = round_bf16(a.max(), up=True)
    smallest = round_bf16(a[a > 0].min(), up=False)
    c = np.sqrt(largest) * np.sqrt(smallest)
    binades = np.clip(np.log2(largest / smallest), 1e-9, 48)
    k = min(np.floor(16 * np.log2(fmt.max**2 / 2) / binades) / 16, 16)
    y, s = (a / c) ** k, (largest / c) ** k / fmt.max
    # Floats of 8 bits in np.where and np.maximum crash NumPy 2.0, so the bound comes first.
    q = cast(np.where(a > 0, np.maximum(y / s, fmt.smallest_subnormal), 0), fmt)
    return q, np.sign(part) * (q.astype(np.float64) * s) ** (1 / k) * c, k


def round_bf16(value: float, *, up: bool) -> float:
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0xFFFF if up else bits) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))
