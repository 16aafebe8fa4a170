"""Kinds of devices that a program may be traced for, also of some that are not there."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import jax

from jfp8.tracing.listing import did_you_mean

# By the name of the device, for programs that are compiled without it.
_CAPABILITIES = {
    r"\b(H100|H200|H20|H800|GH200)\b": (9, 0),
    r"\b(B100|B200|GB200)\b": (10, 0),
    r"\b(B300|GB300)\b": (10, 3),
    r"\b(RTX 50\d\d|RTX PRO \d+)\b": (12, 0),
    r"\b(L4|L40|L40S|RTX 40\d\d|RTX 6000 Ada)\b": (8, 9),
    r"\b(A100|A800|A30)\b": (8, 0),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
      kind: its name, such as ``"NVIDIA H200"``; "" if only the platform is known.
      capability: compute capability, such as ``(9, 0)``; None if the name does not tell.
      partly_manual: whether it is inside a ``shard_map`` over some axes of the mesh, while the
        compiler divides arrays along the others. No kernel can be partitioned there.
      platform: ``"cuda"``, or ``"rocm"`` for a GPU of AMD.
    """

    kind: str
    capability: tuple[int, int] | None
    partly_manual: bool = False
    platform: str = "cuda"

    @property
    def hopper(self) -> bool:
        """Return whether the GPU has Hopper's tensor cores."""
        return self.capability is not None and self.capability[0] == 9

    @property
    def multiplies_f8(self) -> bool:
        """Return whether the GPU has FP8 tensor cores; True if unknown."""
        return self.capability is None or self.capability >= (8, 9)


@dataclass(frozen=True)
class Tpu:
    """A TPU.

    Attributes:
      kind: its name, such as ``"TPU7x"``.
      divides: whether the compiler divides arrays among several. Kernels cannot be partitioned
        then: libtpu knows no ``custom_partitioning``.
    """

    kind: str
    divides: bool = False
    platform: str = "tpu"

    @property
    def multiplies_f8(self) -> bool:
        """Return whether matrix units take f8, from TPU7x on. Earlier ones convert it to bf16."""
        return re.match(r"TPU v\d", self.kind) is None


@dataclass(frozen=True)
class Several:
    """A program that is lowered once for several platforms; see `for_platforms`."""

    platforms: tuple[str, ...]
    platform: str = "several"


@dataclass(frozen=True)
class Chip:
    """Any other device that a module plans for."""

    platform: str
    kind: str = ""


Device: TypeAlias = Gpu | Tpu | Chip | Several | None
"""None stands for a CPU, or any other device that the reference computes for."""


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


def unknown_card(card: str, rated: Collection[str]) -> str:
    """Say that no card has this name, with the nearest of those with known rates, and all."""
    word = (card.upper().split() or [""])[-1]
    hint = did_you_mean(word, rated)
    return f"{card!r} is no card that jfp8 knows.{hint} Cards with known rates: {', '.join(rated)}"
