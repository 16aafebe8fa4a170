"""What was measured on a card, and is used instead of models of time: layers, and tiles of kernels.

``python -m jfp8 bench`` times layers: each kind of card, with each version of jfp8, JAX and CUDA,
has a file next to the verdicts. ``python -m jfp8 tune`` times tiles, and fills ``tuned.json``:
``{device kind: {kernel: {shape class: {"tiles": fields, ...}}}}``.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

import jax
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


def measured(kernel: str, *shape: int) -> dict[str, Any] | None:
    """Return the fastest measured tiles for such arrays on the current GPU, if any."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = jax.devices()[0].device_kind if described is None else described.device_kind
    entry = _table().get(kind, {}).get(kernel, {}).get(shape_class(shape))
    return None if entry is None else entry["tiles"]


def shape_class(shape: tuple[int, ...]) -> str:
    """Round each size up to a power of two: ``(15872, 16384, 4096)`` is ``16384x16384x4096``."""
    return "x".join(str(1 << max(size - 1, 0).bit_length()) for size in shape)


@functools.cache
def _table() -> dict[str, Any]:
    text = importlib.resources.files("jfp8.kernels.hopper").joinpath("tuned.json").read_text()
    return json.loads(text)
