"""Layers that ``python -m jfp8 bench`` timed on a card, used instead of the model of time.

Each kind of card, with each version of jfp8, JAX and CUDA, has a file next to the verdicts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from jfp8.kernels.verdicts import verdict_file

# The recipes that are timed, by the `cost_model`'s kind of scales.
RECIPES = {
    "one": ("delayed", "current"),
    "rows": ("rowwise",),
    "blocks": ("block",),
    "mx": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}


def bench_file(kind: str) -> Path:
    """Return the path where `bench` stores the rates of a `kind` of card, with these versions."""
    path = verdict_file(kind)
    return path.parent.with_name("bench") / path.name


def measured_gain(kind: str, scales: str, multiplications: float) -> float | None:
    """Return the measured speedup of a layer over bf16 on a `kind` of card; None if not timed.

    ``g = time in bf16 / time in FP8``, interpolated in ``log(multiplications)`` between the sizes
    that were timed, and constant beyond them. Averaged over recipes with the same kind of scales.
    """
    try:
        rates = json.loads(bench_file(kind).read_text(encoding="utf-8"))["rates"]
        gains: dict[int, list[float]] = {}
        for recipe in RECIPES[scales]:
            for name, rate in rates.items():
                label, _, n = name.rpartition(", ")
                if label == f"layer, {recipe}" and "us" in rate:
                    in_bf16 = rates[f"layer, bf16, {n}"]["us"]
                    gains.setdefault(int(n), []).append(in_bf16 / rate["us"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # `bench` rewrites it
    sizes = sorted(gains)
    if not sizes:
        return None
    at = [3 * math.log(n) for n in sizes]
    of = [float(np.mean(gains[n])) for n in sizes]
    return float(np.interp(math.log(max(multiplications, 1.0)), at, of))
