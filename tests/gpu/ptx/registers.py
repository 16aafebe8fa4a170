"""Number the registers of a kernel, and the constants beside them: one list for each warp."""

from __future__ import annotations

import re

import numpy as np

from gpu.ptx.memory import REGION, SHARED, SPACING

LANES = np.arange(32)
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# What a register holds that nothing has written; a constant, so that runs are alike.
UNWRITTEN = 0xAAAA_5555_AAAA_5555


def constant(value: int, bits: int) -> np.ndarray:
    """Return a number in all lanes."""
    return np.full(32, value & ((1 << bits) - 1), UNSIGNED[bits])


class Registers:
    """Map names and numbers to places in a list, of which `initial` is the first content."""

    def __init__(self, widths: dict[str, int]):
        self.widths = widths
        self.places: dict[tuple[str, int], int] = {}
        self.initial: list[np.ndarray] = []
        self.names: list[str] = []

    def __call__(self, operand: str, bits: int = 32) -> int:
        """Return the place of a register, or of a number with so many bits."""
        width = self._width(operand)
        key = (operand, width or bits)
        if key not in self.places:
            self.places[key] = len(self.initial)
            self.names.append(operand)
            first = UNWRITTEN if width else _number(operand)
            self.initial.append(constant(first, key[1]))
        return self.places[key]

    def is_register(self, operand: str) -> bool:
        return self._width(operand) is not None

    def _width(self, operand: str) -> int | None:
        if re.match(r"%(n?ctaid|tid|cluster_)", operand):
            return 32
        for name in (operand, re.sub(r"\d+$", "", operand)):
            if name in self.widths:
                return self.widths[name]
        return None


def _number(operand: str) -> int:
    if operand.startswith(("0f", "0d")):
        return int(operand[2:], 16)
    if operand == "__dynamic_shmem__0":
        return SHARED
    if found := re.search(r"_param_(\d+)$", operand):
        return REGION + int(found[1]) * SPACING
    return int(operand, 0)
