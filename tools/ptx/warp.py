"""Run a warp: 32 lanes with one place in the program, up to where others may come in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.events import Groups
from ptx.memory import Fault
from ptx.parser import Instruction

if TYPE_CHECKING:
    from ptx.block import Block

ALL, NONE = bytes([1] * 32), bytes(32)
EVERY_LANE = np.ones(32, bool)

Waiting = Callable[[], bool]  # returns True when the warp may go on
# The effect of an instruction on the lanes of a warp that take part.
Act = Callable[["Warp", np.ndarray], Waiting | None]


@dataclass(frozen=True)
class Step:
    """One instruction, ready to run.

    Either `compute` changes registers alone; or `act` does anything, of a warp and its lanes that
    take part, and may return what the warp then waits for; or it is a jump to `target`.
    """

    instruction: Instruction
    predicate: int | None
    compute: Callable[[list[Any]], None] | None = None
    writes: tuple[int, ...] = ()
    act: Act | None = None
    target: int | None = None
    touches: frozenset[int] = frozenset()  # registers that it reads or writes
    visible: bool = False  # do others see it, or it what others do?


@dataclass(eq=False)
class Warp:
    """The state of a warp."""

    block: Block
    number: int
    registers: list[Any]
    place: int = 0
    waiting: Waiting | None = None
    ended: bool = False
    steps: int = 0
    met: int = 0  # how often it came to the barrier of its cluster
    in_flight: Counter[int] = field(default_factory=Counter)  # registers that a product will write
    fenced: list[Any] = field(default_factory=list)  # contents at the last wgmma.fence
    products: Groups = field(default_factory=Groups)
    stores: Groups = field(default_factory=Groups)

    def ready(self) -> bool:
        """Tell whether the warp can go on."""
        return not self.ended and (self.waiting is None or self.waiting())

    def run(self) -> None:
        """Run up to the next visible step, and that."""
        program, r = self.block.program, self.registers
        self.waiting = None
        while True:
            step = program[self.place]
            self.steps += 1
            if self.in_flight and not step.touches.isdisjoint(self.in_flight):
                self._fault(step, "touches a register that a product has yet to write")
            lanes, part = self._lanes(step)
            if step.target is not None:
                if part:
                    self._fault(step, "is a branch that some lanes of a warp take and others not")
                self.place = step.target if lanes is not None else self.place + 1
                continue
            self.place += 1
            if lanes is None:
                continue
            if step.act is None:
                assert step.compute is not None
                before = [r[i] for i in step.writes] if part else ()
                step.compute(r)
                for i, old in zip(step.writes, before, strict=False):
                    r[i] = np.where(lanes, r[i], old)
                continue
            try:
                self.waiting = step.act(self, lanes)
            except Fault as fault:
                self._fault(step, str(fault))
            if step.visible or self.ended:
                return

    def _lanes(self, step: Step) -> tuple[np.ndarray | None, bool]:
        """Return which lanes take part, None if none; and whether it is a part of them."""
        if step.predicate is None:
            return EVERY_LANE, False
        lanes = self.registers[step.predicate]
        if step.instruction.negated:
            lanes = ~lanes
        found = lanes.tobytes()
        return (None, False) if found == NONE else (lanes, found != ALL)

    def _fault(self, step: Step, what: str) -> None:
        raise Fault(f"warp {self.number}: {what} (`{step.instruction.text}`)")
