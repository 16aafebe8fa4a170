"""The tiles that were measured to be fastest, in ``tuned.json``.

The table is ``{device kind: {kernel: {shape class: {"tiles": fields, ...}}}}``, and is filled by
``python -m jfp8 tune``. A shape class has each size rounded up to a power of two.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import jax


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
