"""The work for a device: cases, in groups that are timed alternately, in sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from on_gpu.records import Record


@dataclass(frozen=True)
class Timed:
    """Something to time.

    Attributes:
      run: does it `calls` times.
      facts: for its record.
      shorter: does it `shorter_calls` times; for slopes, where the device keeps no times itself.
    """

    run: Callable[[], Any]
    calls: int = 1
    facts: Record = field(default_factory=dict)
    shorter: Callable[[], Any] | None = None
    shorter_calls: int = 0


@dataclass(frozen=True)
class Case:
    """One line of the result.

    Attributes:
      name: unique in its group.
      prepare: compiles and runs it once, and returns what is to be timed, or the record itself.
      kernels: names of its kernels. No other case with one of them is tried after one hung.
    """

    name: str
    prepare: Callable[[], Timed | Record]
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Cases that are timed in turn, so that a change of clock hits them alike.

    Attributes:
      cases: most important first: the last ones are left out where time is short.
      baseline: the case that the others are compared to.
      seconds: if not 0, each case runs alone for so long, at the clock that it settles at.
    """

    name: str
    cases: list[Case]
    baseline: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The settings that sections receive.

    Attributes:
      smoke: sizes so small that a CPU interprets the kernels in no time.
      repeats, warmups: numbers of calls of each timed case.
      compiling, running: seconds after which a worker that says nothing is ended: while it
        compiles, and after it said `running`.
      hlo: folder for compiled programs, or None.
      groups: pattern of the names of groups to run.
    """

    smoke: bool = False
    repeats: int = 20
    warmups: int = 5
    compiling: float = 150.0
    running: float = 40.0
    hlo: str | None = None
    groups: str = ""


Section = Callable[[Settings], Iterable[Group]]
