"""Keep a device's memory: arrays, and the shared memory of a block with its barriers.

Shared memory knows what passes by it behind the back of warps: which bytes a warp wrote without
telling the copy engine and the tensor cores (the async proxy), which bytes a copy will write, and
which an unfinished copy or product still reads. To touch these is a `Fault` in any order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SHARED = 1024  # where shared memory begins, so that an offset alone is no address
REGION = 1 << 40  # from one array to the next
SPACING = 65536  # from one parameter of a kernel to the next


class Fault(Exception):
    """What a program must not do, or what a device might do differently each time."""


class DeviceMemory:
    """Hold arrays, far from each other, and before them the parameters that point to some."""

    def __init__(self, arrays: Sequence[np.ndarray], parameters: Sequence[int | None]):
        self.arrays = [np.frombuffer(x.tobytes(), np.uint8).copy() for x in arrays]
        pointers = np.zeros((len(parameters), SPACING // 8), np.int64)
        pointers[:, 0] = [0 if n is None else (n + 2) * REGION for n in parameters]
        self.regions = [pointers.view(np.uint8).ravel(), *self.arrays]

    def _place(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the array in which the bytes are, and where in it."""
        number, offsets = int(at.flat[0]) // REGION - 1, at % REGION
        known = 0 <= number < len(self.regions) and (at // REGION == number + 1).all()
        if not known or offsets.max() >= len(self.regions[number]):
            raise Fault(f"{int(at.max()):#x} is in no array")
        return self.regions[number], offsets

    def load(self, at: np.ndarray) -> np.ndarray:
        array, offsets = self._place(at)
        return array[offsets]

    def store(self, at: np.ndarray, values: np.ndarray, warp: int) -> None:
        array, offsets = self._place(at)
        array[offsets] = values


@dataclass
class MBarrier:
    """Count arrivals and bytes of a phase."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, number: int, expected: int = 0) -> None:
        self.bytes += expected
        self.pending -= number
        if self.pending < 0:
            raise Fault(f"{-self.pending} more arrivals than the {self.count} of a barrier's phase")
        self._end_phase()

    def receive(self, number: int) -> None:
        self.bytes -= number
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class SharedMemory:
    """Hold the bytes of a block, which begin as NaN of all types."""

    size: int
    barriers: dict[int, MBarrier] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bytes = np.full(SHARED + self.size, 0xFF, np.uint8)
        self.writer = np.zeros(len(self.bytes), np.int16)  # a warp + 1, unfenced
        self.read_later = np.zeros(len(self.bytes), np.int16)  # by how many copies or products
        self.written_later = np.zeros(len(self.bytes), np.int16)  # by how many copies
        self.written: dict[int, list[np.ndarray]] = {}  # each warp's writes since its last fence

    def _check(self, at: np.ndarray, who: str, marks: np.ndarray, what: str) -> None:
        if (marked := marks[at]).any():
            raise Fault(f"{who} byte {at[marked != 0][0] - SHARED} of shared memory, which {what}")

    def barrier(self, address: int) -> MBarrier:
        if address not in self.barriers:
            raise Fault(f"there is no barrier at byte {address - SHARED} of shared memory")
        return self.barriers[address]

    # Warps

    def load(self, at: np.ndarray) -> np.ndarray:
        self._inside(at)
        self._check(at, "a warp reads", self.written_later, "a copy has yet to write")
        return self.bytes[at]

    def store(self, at: np.ndarray, values: np.ndarray, warp: int) -> None:
        self._inside(at)
        self._check(at, "a warp writes", self.read_later, "a copy or product has yet to read")
        self._check(at, "a warp writes", self.written_later, "a copy has yet to write")
        self.bytes[at] = values
        self.writer[at] = warp + 1
        self.written.setdefault(warp, []).append(at.ravel())

    def fence(self, warp: int) -> None:
        """Show what a warp wrote to the async proxy."""
        for at in self.written.pop(warp, []):
            self.writer[at] = np.where(self.writer[at] == warp + 1, 0, self.writer[at])

    def _inside(self, at: np.ndarray) -> None:
        if at.min() < SHARED or at.max() >= len(self.bytes):
            raise Fault(f"byte {int(at.max()) - SHARED} is not in shared memory")

    # Copies and products

    def will_read(self, at: np.ndarray) -> None:
        self._inside(at)
        self.read_later[at] += 1

    def read(self, at: np.ndarray, who: str) -> np.ndarray:
        """Read at last what was announced."""
        self.read_later[at] -= 1
        self._check(at, f"{who} reads", self.written_later, "a copy has yet to write")
        self._check(at, f"{who} reads", self.writer, "a warp wrote without a fence")
        return self.bytes[at]

    def will_write(self, at: np.ndarray) -> None:
        self._inside(at)
        self._check(at, "a copy goes to", self.read_later, "a copy or product has yet to read")
        self._check(at, "a copy goes to", self.written_later, "another copy has yet to write")
        self.written_later[at] += 1

    def write(self, at: np.ndarray, values: np.ndarray) -> None:
        """Write at last what was announced."""
        self.written_later[at] -= 1
        self.bytes[at] = values
        self.writer[at] = 0
