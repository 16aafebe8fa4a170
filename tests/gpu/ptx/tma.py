"""Copy tiles between device memory and shared memory, as the copy engine does (TMA)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpu.ptx.access import address
from gpu.ptx.events import Event, grouped
from gpu.ptx.host import Tensor
from gpu.ptx.memory import REGION, SPACING, Fault, MBarrier, SharedMemory
from gpu.ptx.parser import Instruction, Registers, vector
from gpu.ptx.warp import Act, Warp
from gpu.ptx.wgmma import swizzled


class Copy(NamedTuple):
    """Bytes here and there; outside of the array there are zeros."""

    array: np.ndarray
    places: np.ndarray
    inside: np.ndarray
    shared: SharedMemory
    tile: np.ndarray

    @classmethod
    def of(cls, warp: Warp, tensor: Tensor, corner: list[int], to: int) -> Copy:
        """Return the copy of a box, the coordinates of its `corner` the innermost last."""
        if to % 128:
            raise Fault("a copy's place in shared memory is not a multiple of 128")
        offset, inside = np.zeros((), np.int64), np.ones((), bool)
        sides = zip(tensor.sizes, tensor.strides, tensor.box, corner, strict=True)
        for size, stride, length, start in sides:
            at = start + np.arange(length)
            offset = offset[..., None] + at * stride
            inside = inside[..., None] & (at >= 0) & (at < size)
        item = tensor.item
        places = (offset.reshape(-1, 1) * item + np.arange(item)).ravel()
        tile = swizzled(to + np.arange(len(places)), tensor.swizzle)
        array = warp.block.memory.arrays[tensor.argument]
        return cls(array, places, np.repeat(inside.ravel(), item), warp.block.shared, tile)

    def bring(self, barrier: MBarrier) -> Callable[[], None]:
        """Return the copy to shared memory, which a barrier counts."""
        self.shared.will_write(self.tile)

        def happen() -> None:
            content = np.zeros(len(self.tile), np.uint8)
            content[self.inside] = self.array[self.places[self.inside]]
            self.shared.write(self.tile, content)
            barrier.receive(len(self.tile))

        return happen

    def take(self) -> Callable[[], None]:
        """Return the copy from shared memory."""
        self.shared.will_read(self.tile)

        def happen() -> None:
            content = self.shared.read(self.tile, "a copy")
            self.array[self.places[self.inside]] = content[self.inside]

        return happen


def bulk(instruction: Instruction, at: Registers) -> Act | None:
    """Return what runs an instruction of bulk copies; None: it is another."""
    op, operands = instruction.op, instruction.operands
    if not op.startswith("cp.async.bulk"):
        return None
    if waits := grouped(op, operands, "stores"):
        return waits
    brings = ".global.mbarrier" in op
    tensor, place = (operands[1], operands[0]) if brings else operands
    base, corner = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", tensor).groups()
    base, corner = at(base, 64), [at(x) for x in vector(corner)][::-1]
    place, barrier = address(place, at), address(operands[2], at) if brings else None

    def start(warp: Warp, lanes: np.ndarray) -> None:
        if lanes.sum() != 1:
            raise Fault(f"{lanes.sum()} lanes start the same copy")
        r, lane = warp.registers, int(np.flatnonzero(lanes)[0])
        tensor = warp.block.tensors[divmod(int(r[base][lane]) - REGION, SPACING)]
        corner_here = [int(r[x].view(np.int32)[lane]) for x in corner]
        copy = Copy.of(warp, tensor, corner_here, int(place(r)[lane]))
        if barrier is not None:
            signal = warp.block.shared.barrier(int(barrier(r)[lane]))
            Event("copy to shared memory", warp, [copy.bring(signal)])
        else:
            warp.stores.begun.append(Event("copy from shared memory", warp, [copy.take()]))

    return start
