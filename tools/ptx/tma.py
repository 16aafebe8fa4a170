"""Copy tiles between device memory and shared memory, as the copy engine does (TMA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx.access import address
from ptx.events import Event, grouped
from ptx.host import Tensor
from ptx.memory import REGION, SPACING, Fault
from ptx.parser import Instruction, Registers, vector
from ptx.text import read
from ptx.warp import Act, Warp
from ptx.wgmma import swizzled

if TYPE_CHECKING:
    from ptx.block import Block


class Copy(NamedTuple):
    """Bytes here and there; outside of the array there are zeros."""

    array: np.ndarray
    places: np.ndarray
    inside: np.ndarray
    block: Block
    tile: np.ndarray

    @classmethod
    def of(cls, block: Block, tensor: Tensor, corner: list[int], to: int) -> Copy:
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
        array = block.memory.arrays[tensor.argument]
        return cls(array, places, np.repeat(inside.ravel(), item), block, tile)

    def bring(self, address: int) -> Callable[[], None]:
        """Return the copy to shared memory, which the barrier at this address counts."""
        shared = self.block.shared
        barrier = shared.barrier(address)
        shared.will_write(self.tile)

        def happen() -> None:
            self.block.must_run("a copy")
            content = np.zeros(len(self.tile), np.uint8)
            content[self.inside] = self.array[self.places[self.inside]]
            shared.write(self.tile, content)
            barrier.receive(len(self.tile))

        return happen

    def take(self) -> Callable[[], None]:
        """Return the copy from shared memory."""
        shared = self.block.shared
        shared.will_read(self.tile)

        def happen() -> None:
            content = shared.read(self.tile, "a copy")
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
    base_name, names = read(r"^\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]$", tensor).groups()
    base, corner = at(base_name, 64), [at(x) for x in vector(names)][::-1]
    placed, barrier = address(place, at), address(operands[2], at) if brings else None
    mask = at(operands[3], 16) if ".multicast" in op else None

    def start(warp: Warp, lanes: np.ndarray) -> None:
        if lanes.sum() != 1:
            raise Fault(f"{lanes.sum()} lanes start the same copy")
        r, lane = warp.registers, int(np.flatnonzero(lanes)[0])
        tensor = warp.block.tensors[divmod(int(r[base][lane]) - REGION, SPACING)]
        corner_here = [int(r[x].view(np.int32)[lane]) for x in corner]
        blocks = [warp.block]
        if mask is not None:
            given = int(r[mask][lane])
            blocks = [block for i, block in enumerate(warp.block.cluster) if given >> i & 1]
        copies = [Copy.of(block, tensor, corner_here, int(placed(r)[lane])) for block in blocks]
        if barrier is not None:
            for copy in copies:
                Event("copy to shared memory", warp, [copy.bring(int(barrier(r)[lane]))])
        else:
            (copy,) = copies
            warp.stores.begun.append(Event("copy from shared memory", warp, [copy.take()]))

    return start
