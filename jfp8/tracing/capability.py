"""Compute capability of NVIDIA's GPUs, also of those that are not there."""

from __future__ import annotations

import re

import jax

# By the name of the device, for programs that are compiled without it.
_CAPABILITIES = {
    r"\b(H100|H200|H20|H800|GH200)\b": (9, 0),
    r"\b(B100|B200|GB200)\b": (10, 0),
    r"\b(B300|GB300)\b": (10, 3),
    r"\b(L4|L40|L40S|RTX 40\d\d|RTX 6000 Ada)\b": (8, 9),
    r"\b(A100|A800|A30)\b": (8, 0),
}


def capability_of(kind: str) -> tuple[int, int] | None:
    """Return the capability of a device of this kind here, or what the name of the kind says."""
    if jax.default_backend() == "gpu":
        for device in jax.devices():
            said = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
            if said is not None and device.device_kind == kind:
                return int(said[1]), int(said[2])
    for pattern, capability in _CAPABILITIES.items():
        if re.search(pattern, kind):
            return capability
    return None
