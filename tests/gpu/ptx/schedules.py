"""Choose what happens next, where a device is free to: copies and products end, warps go on.

A schedule chooses among a block's warps that can go on, and events that can happen. A warp runs on
to its next barrier, copy or product.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Turns:
    """Let warps take turns, and everything else happen at once, or when all warps wait for it.

    Of what comes late, what began last is first.
    """

    early: bool
    turn: int = field(default=0, repr=False)

    def choose(self, warps: list[Any], events: list[Any]) -> Any:
        if events and (self.early or not warps):
            return events[0 if self.early else -1]
        self.turn += 1
        return warps[self.turn % len(warps)]


@dataclass
class Drawn:
    """Draw each time."""

    seed: int

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def choose(self, warps: list[Any], events: list[Any]) -> Any:
        return self.draw.choice([*warps, *events])


@dataclass
class Ahead(Drawn):
    """Draw an order once: the first that can go on runs ahead of all behind it, events as warps."""

    places: dict[Any, float] = field(default_factory=dict, repr=False)

    def choose(self, warps: list[Any], events: list[Any]) -> Any:
        return min([*warps, *events], key=lambda x: self.places.setdefault(x, self.draw.random()))


class Known(Exception):
    """A run is where another one was before."""


@dataclass
class Following:
    """Follow choices, then take the first each time. The warps of a warpgroup go on together."""

    choices: list[int]
    seen: set[Any]
    branches: list[int] = field(default_factory=list)  # how many there were at each choice
    together: list[Any] = field(default_factory=list)

    def choose(self, warps: list[Any], events: list[Any]) -> Any:
        self.together = [warp for warp in self.together if warp in warps]
        if not self.together:
            groups = sorted({warp.number // 4 for warp in warps})
            # Without copies or products that may end, no order of warps matters.
            number = self._number(events[0].warp.block, len(groups) + len(events)) if events else 0
            if number >= len(groups):
                return events[number - len(groups)]
            self.together = [warp for warp in warps if warp.number // 4 == groups[number]]
        return self.together.pop(0)

    def _number(self, block: Any, count: int) -> int:
        at = len(self.branches)
        self.branches.append(count)
        if at < len(self.choices):
            return self.choices[at]
        state = tuple(warp.steps for warp in block.warps), frozenset(e.name for e in block.events)
        if state in self.seen:
            self.branches.pop()
            raise Known
        self.seen.add(state)
        return 0


def every(run: Callable[[Following], None]) -> Iterator[None]:
    """Run under every order of warpgroups and events, from each state once."""
    todo: list[list[int]] = [[]]
    seen: set[Any] = set()
    while todo:
        choices = todo.pop()
        schedule = Following(choices, seen)
        try:
            run(schedule)
            yield
        except Known:
            pass
        taken = choices + [0] * (len(schedule.branches) - len(choices))
        for at in range(len(choices), len(taken)):
            todo += [[*taken[:at], n] for n in range(1, schedule.branches[at])]
