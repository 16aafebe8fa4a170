"""Choose what happens next, where a device is free to: copies and products end, warps go on.

A schedule chooses among a block's warps that can go on, and events that can happen. A warp runs on
to its next barrier, copy or product.
"""

import random
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
