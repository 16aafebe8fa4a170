"""Run the blocks of a kernel, each step of it chosen by a schedule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.access import access
from ptx.arithmetic import arithmetic
from ptx.control import control
from ptx.events import Event
from ptx.host import Launch, Tensor
from ptx.memory import DeviceMemory, Fault, SharedMemory
from ptx.parser import LANES, Instruction, Registers, constant, parse
from ptx.tma import bulk
from ptx.warp import Step, Warp
from ptx.wgmma import wgmma

WARPS = 4  # in a warpgroup
# Steps after which others may come in between.
VISIBLE = ("mbarrier", "bar.", "fence.proxy", "wgmma.wait", "setmaxnreg", "barrier.cluster")
VISIBLE += ("cp.async.bulk.tensor", "cp.async.bulk.wait")


class Program:
    """A kernel, ready to run: PTX and how it is launched."""

    def __init__(self, ptx: str, launch: Launch, registers: int):
        self.launch, self.registers = launch, registers
        kernel = parse(ptx)
        self.at = Registers(kernel.widths)
        self.steps = [self._step(i, kernel.labels) for i in kernel.instructions]

    def _step(self, instruction: Instruction, labels: dict[str, int]) -> Step:
        at = self.at
        predicate = None if instruction.predicate is None else at(instruction.predicate)
        if instruction.op.startswith("bra"):
            return Step(instruction, predicate, target=labels[instruction.operands[0]])
        visible = instruction.op.startswith(VISIBLE)
        if found := arithmetic(instruction, at):
            run, writes = found
            touches = self._named(instruction)
            return Step(instruction, predicate, run, tuple(writes), touches=touches)
        for family in (control, access, wgmma, bulk):
            if act := family(instruction, at):
                # Products themselves may add to what others will write.
                own = frozenset() if family is wgmma else self._named(instruction)
                return Step(instruction, predicate, act=act, touches=own, visible=visible)
        raise Fault(f"not known: {instruction.text}")

    def _named(self, instruction: Instruction) -> frozenset[int]:
        names = re.findall(r"[%A-Za-z_][\w.@]*", " ".join(instruction.operands))
        return frozenset(self.at(name) for name in names if self.at.is_register(name))

    def run(
        self, arrays: Sequence[np.ndarray], schedule: Any, *, collective: bool = True
    ) -> tuple[list[np.ndarray], int]:
        """Return the bytes of all arrays after all blocks have run, and how many steps it took."""
        memory, steps = DeviceMemory(arrays, self.launch.parameters), 0
        grid, size = self.launch.grid[::-1], self.launch.cluster[::-1]
        with np.errstate(all="ignore"):
            for corner in itertools.product(*map(range, [0] * 3, grid, size)):
                cluster: list[Block] = []
                for rank in np.ndindex(*size):
                    place = tuple(np.add(corner, rank).tolist()[::-1])
                    cluster.append(Block(self, memory, place, rank[::-1], collective, cluster))
                run(cluster, schedule)
                steps += sum(warp.steps for block in cluster for warp in block.warps)
        return memory.arrays, steps


@dataclass(eq=False)
class Block:
    """The state of a block."""

    of: Program
    memory: DeviceMemory
    place: tuple[int, ...]
    rank: tuple[int, ...]  # the place in its cluster
    collective: bool  # see `wgmma`
    cluster: list[Block]
    events: list[Event] = field(default_factory=list)
    named_barriers: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        launch = self.of.launch
        self.program = self.of.steps
        self.tensors: dict[tuple[int, int], Tensor] = launch.tensors
        self.shared = SharedMemory(launch.shared_memory)
        count = launch.threads // 32
        self.registers = [self.of.registers] * count  # number per thread, for each warp
        self.issued = [0] * count  # each warp's products
        self.products: dict[int, list[Event]] = {}  # by the number of a warpgroup or warp
        self.warps = [Warp(self, n, self._first_registers(n)) for n in range(count)]

    def _first_registers(self, warp: int) -> list[Any]:
        special = {"%tid.x": (LANES + 32 * warp).astype(np.uint32)}
        for axis, name in enumerate("xyz"):
            special[f"%ctaid.{name}"] = constant(self.place[axis], 32)
            special[f"%nctaid.{name}"] = constant(self.of.launch.grid[axis], 32)
            special[f"%cluster_ctaid.{name}"] = constant(self.rank[axis], 32)
        registers = list(self.of.at.initial)
        for (name, _), place in self.of.at.places.items():
            registers[place] = special.get(name, registers[place])
        return registers

    def must_run(self, what: str) -> None:
        """Refuse what comes to the shared memory of a block after its end."""
        if all(warp.ended for warp in self.warps):
            raise Fault(f"{what} comes to a block that has ended")

    def product(self, warp: Warp, part: Callable[[], None]) -> Event:
        """Return the product that this is a part of, in the order of its warpgroup or warp."""
        owner = warp.number // WARPS if self.collective else ~warp.number
        events = self.products.setdefault(owner, [])
        number = self.issued[warp.number]
        self.issued[warp.number] += 1
        if number == len(events):
            needed, before = WARPS if self.collective else 1, events[-1] if events else None
            events.append(Event("product", warp, [], needed, before))
        events[number].parts.append(part)
        return events[number]


def run(cluster: list[Block], schedule: Any) -> None:
    """Run blocks together until all warps have ended and nothing is left to happen."""
    every = [warp for block in cluster for warp in block.warps]
    while True:
        warps = [warp for warp in every if warp.ready()]
        events = [event for block in cluster for event in block.events if event.ready()]
        if not warps and not events:
            break
        chosen = schedule.choose(warps, events)
        if isinstance(chosen, Warp):
            chosen.run()
        else:
            chosen.happen()
    if stuck := [warp for warp in every if not warp.ended]:
        steps = (warp.block.program[warp.place - 1].instruction.text for warp in stuck)
        raise Fault(f"all wait for ever: warp {stuck[0].number} after `{next(steps)}`")
    for block in cluster:
        for address, barrier in block.shared.barriers.items():
            if barrier.bytes:
                raise Fault(f"the barrier at {address} still expects {barrier.bytes} bytes")
