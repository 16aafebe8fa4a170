"""Amaxes, and values on the grid that they give, in NumPy."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FORMAT_MAX = {E4M3: 448.0, E5M2: 57344.0}
ROLES = ("lhs", "rhs", "grad")


def amax(x) -> np.float32:
    return np.max(np.abs(np.asarray(x, np.float32)), initial=np.float32(0))


def fake_quantize(x, dtype, history_amax=None) -> np.ndarray:
    """Round `x` to the grid of `dtype` that an amax (default: its own) gives, in float64."""
    largest = amax(x) if history_amax is None else np.float32(history_amax)
    scale = largest / np.float32(FORMAT_MAX[dtype]) if largest else np.float32(1)
    scaled = np.asarray(x, np.float32) * (np.float32(1) / scale)
    codes = np.clip(scaled, -FORMAT_MAX[dtype], FORMAT_MAX[dtype]).astype(dtype)
    return codes.astype(np.float64) * np.float64(scale)


def only_product(tree):
    """Return what the only product of a model holds in a collection, wherever it is."""
    while not {"lhs", "amax"} & set(tree):
        (tree,) = tree.values()
    return tree


def peaking(shape, peak, seed=0) -> np.ndarray:
    """Draw numbers below 1 in size but for one that is `peak`."""
    draw = np.random.default_rng(seed).uniform(-1, 1, size=shape).astype(np.float32)
    draw.flat[seed % draw.size] = peak
    return draw


def on_a_grid_of_power_of_two(x, dtype=E4M3) -> np.ndarray:
    """Round `x` to the grid of `dtype` with the smallest power of two as scale that fits."""
    x = np.asarray(x)
    scale = np.float32(2.0 ** np.ceil(np.log2(np.abs(x).max() / FORMAT_MAX[dtype])))
    return (x / scale).astype(dtype).astype(np.float32) * scale
