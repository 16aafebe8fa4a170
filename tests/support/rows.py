"""Rows of statistics that no program made."""

from jfp8.debug.records import TensorStats

_NUMBERS = dict.fromkeys(("underflow", "overflow", "nonfinite"), 0.0) | {
    "amax": 1.0,
    "scale_min": 2.0**-8,
    "scale_max": 2.0**-8,
    "rms": 0.5,
    "mse": 1e-6,
    "sqnr": 28.0,
    "headroom": 0.8,
    "exponents": {-1: 48, 0: 16},
}


def row(step=0, path="Dense_0", tensor="grad", **given):
    """Return a row of a healthy tensor as `jfp8.debug.stats` gives, but for what is `given`."""
    products = "dgrad+wgrad" if tensor == "grad" else "fprop+wgrad"
    where = {"index": (), "products": products, "recipe": "delayed", "format": "E4M3FN"}
    where |= {"order": 0, "count": 64}
    return TensorStats(step=step, path=path, tensor=tensor, **(where | _NUMBERS | given))
