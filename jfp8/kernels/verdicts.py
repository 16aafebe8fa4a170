"""Verdicts and times of cards, which planners read while a program is traced for such a card.

``python -m jfp8 check`` finds kernels that compute wrong results, and times layers. It writes both
to the user's cache directory, a JSON file for each kind of card and versions of jfp8, JAX and CUDA.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import warnings
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jfp8.tracing.devices import Device, Gpu

_COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")  # for CUDA 13 and 12


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of a verdict; CUDA's is ``"local"`` if no package installed it."""
    compilers = [d.version for d in metadata.distributions() if d.name in _COMPILERS]
    return {
        "jfp8": importlib.import_module("jfp8").__version__,
        "jax": metadata.version("jax"),
        "cuda": max(compilers, default="local"),
    }


def verdict_file(kind: str) -> Path:
    """Return the path of the verdicts on the kernels of a `kind` of card, with these versions."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = " ".join([kind, *(f"{what} {version}" for what, version in versions().items())])
    return Path(cache) / "jfp8" / "verdicts" / (re.sub(r"[^\w.]+", "-", name) + ".json")


def verdicts(kind: str) -> dict[str, dict[str, Any]]:
    """Return the verdict on each kernel of a `kind` of card: its ``"task"`` and ``"failure"``.

    The failure of a kernel that passed its check is empty.
    """
    path = verdict_file(kind)
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"].items()
        return {name: {**k, "task": k["task"], "failure": k["failure"]} for name, k in kernels}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(
            f"The verdicts on jfp8's kernels in {path} cannot be read ({error!r}), so none of them "
            "is excluded. Run `python -m jfp8 check` again.",
            stacklevel=2,
        )
        return {}


def has_passed(task: str, device: Device) -> bool:
    """Return True if there are kernels for a task, and all passed their check on `device`."""
    if not isinstance(device, Gpu) or not device.kind:
        return False
    found = [k["failure"] for k in verdicts(device.kind).values() if k["task"] == task]
    return bool(found) and not any(found)


def why_failed(tasks: Collection[str], device: Device) -> str | None:
    """Return the kernel for `tasks` that failed its check on `device`, and warn; or None."""
    if not isinstance(device, Gpu) or not device.kind:
        return None
    for name, kernel in verdicts(device.kind).items():
        if kernel["task"] in tasks and kernel["failure"]:
            warnings.warn(
                f"{device.kind}: jfp8 does not use its kernels for {kernel['task']}: {name} failed "
                f"`python -m jfp8 check` ({kernel['failure']}). Something slower computes the "
                "same. Check again after an upgrade of jfp8, JAX or CUDA.",
                stacklevel=2,
            )
            return f"{device.kind}: {name} failed `python -m jfp8 check`"
    return None


# Recipes whose layers are timed, by the kind of their scales in `cost_model`.
RECIPES = {
    "one": ("delayed", "current"),
    "rows": ("rowwise",),
    "blocks": ("block",),
    "mx": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}


def measured_gains(kind: str, scales: str) -> dict[tuple[int, int], float]:
    """Return the measured speedups over bf16 of layers on a `kind` of card; none if not timed.

    Layers of ``n x n`` on ``m`` tokens, by ``(m, n)``: ``time in bf16 / time in FP8``, averaged
    over recipes with the same kind of scales.
    """
    try:
        layers = json.loads(verdict_file(kind).read_text(encoding="utf-8"))["layers"]
        gains: dict[tuple[int, int], list[float]] = {}
        for recipe in RECIPES[scales]:
            for size, us in layers[recipe].get("us", {}).items():
                m, n = map(int, size.split("x"))
                gains.setdefault((m, n), []).append(layers["bf16"]["us"][size] / us)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # `verdicts` warns
    return {size: float(np.mean(found)) for size, found in sorted(gains.items())}
