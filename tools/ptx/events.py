"""Name what happens by itself once it was started, at a time that nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx.warp import Warp


@dataclass(eq=False)
class Event:
    """What happens later, at once, but not before `after`.

    A product of a warpgroup has a part for each of its warps, and needs all of them.
    """

    what: str
    warp: Warp  # the one that began it
    parts: list[Callable[[], None]] = field(default_factory=list)
    needed: int = 1
    after: Event | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.warp.block.events.append(self)

    def ready(self) -> bool:
        """Tell whether it can happen now."""
        return len(self.parts) == self.needed and (self.after is None or self.after.done)

    def happen(self) -> None:
        for part in self.parts:
            part()
        self.done, self.parts, self.after = True, [], None
        self.warp.block.events.remove(self)


@dataclass
class Groups:
    """The events of a warp that it commits and waits for in groups, as of copies or products."""

    begun: list[Event] = field(default_factory=list)  # since the last commit
    committed: list[list[Event]] = field(default_factory=list)

    def commit(self) -> None:
        self.committed.append(self.begun)
        self.begun = []

    def wait(self, kept: int) -> Callable[[], bool]:
        """Return the question whether all but the last groups have happened."""
        ended = max(len(self.committed) - kept, 0)
        older, self.committed = self.committed[:ended], self.committed[ended:]
        events = [event for group in older for event in group]
        return lambda: all(event.done for event in events)

    def unfinished(self) -> list[Event]:
        every = (event for group in [*self.committed, self.begun] for event in group)
        return [event for event in every if not event.done]


def grouped(op: str, operands: tuple[str, ...], kind: str) -> Callable | None:
    """Return what runs ``commit_group`` or ``wait_group`` on a warp's groups of this name."""
    if "commit_group" in op:
        return lambda warp, lanes: getattr(warp, kind).commit()
    if "wait_group" in op:
        return lambda warp, lanes: getattr(warp, kind).wait(int(operands[0]))
    return None
