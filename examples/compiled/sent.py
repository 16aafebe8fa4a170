"""`collective_bytes`: count the bytes that a compiled program sends between devices.

A program may send something other than it asks for: XLA moves casts across collectives, merges
collectives, and widens types that a backend cannot send. So the compiled text is read. ::

    sent by a device, of ``b`` bytes of result among ``n`` devices (rings and pairwise exchanges):
        all-gather, all-to-all                          b (n - 1) / n
        all-reduce                                    2 b (n - 1) / n
        reduce-scatter                                  b (n - 1)
        collective-permute, collective-broadcast        b
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from compiled.hlo import Array, Hlo, Instruction, arrays_in, read

_SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,  # at most: its result has room to spare
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}

# The results in ``(operands, results, ...)``: each one shape, or a tuple of them.
_RESULTS = re.compile(r"\((?:\([^()]*\)|\w+\[[\d,]*\]),(\([^()]*\)|\w+\[[\d,]*\])")


@dataclass(frozen=True)
class Collective:
    """A collective operation, or its part of one dtype.

    Attributes:
      op: ``"all-gather"``, ``"all-reduce"``, ...; also for the asynchronous forms of GPUs.
      dtype: XLA's name, such as ``"u8"`` or ``"f32"``.
      elements: number of elements of the result on one device.
      devices: number of devices that exchange data with each other.
      bytes_once: bytes that a device sends in one execution.
      times: executions; None in a loop of unknown length.
      name: JAX's name, such as ``"jit(step)/shard_map/all_gather"``.
      source: file and line, "" if unknown.
    """

    op: str
    dtype: str
    elements: int
    devices: int
    bytes_once: float
    times: int | None
    name: str
    source: str

    @property
    def bytes(self) -> float:
        """Bytes that a device sends; a loop of unknown length counts as one iteration."""
        return self.bytes_once * (1 if self.times is None else self.times)

    def __str__(self) -> str:
        times = "per trip" if self.times is None else f"x {self.times}"
        where = f"{self.name}  {self.source}".strip()
        return (
            f"{self.bytes:>14,.0f}  {self.op:<18} {self.dtype + f'[{self.elements}]':<18} "
            f"{times:<9} over {self.devices:<4} {where}"
        )


@dataclass(frozen=True)
class CollectiveBytes:
    """Result of `collective_bytes`; ``print`` it for a table.

    Attributes:
      collectives: in the order of the program's text.
    """

    collectives: tuple[Collective, ...]

    @property
    def total(self) -> float:
        """Bytes that a device sends; loops of unknown length count as one iteration."""
        return sum((c.bytes for c in self.collectives), 0.0)

    def by_dtype(self) -> dict[str, float]:
        """Return the bytes that a device sends, by dtype."""
        found: dict[str, float] = collections.defaultdict(float)
        for c in self.collectives:
            found[c.dtype] += c.bytes
        return dict(found)

    def __str__(self) -> str:
        rows = sorted(self.collectives, key=lambda c: -c.bytes)
        head = f"{self.total:>14,.0f}  bytes sent by a device"
        if any(c.times is None for c in rows):
            head += ", and more: some loops do not say how often they run"
        return "\n".join([head, *map(str, rows)])


def collective_bytes(compiled: Any) -> CollectiveBytes:
    """Count what a compiled program, or its text, sends between devices; ``print`` the result.

    Every collective counts as often as the loops around it run; both branches of a conditional
    count. XLA:CPU sends bf16 as f32, and f8 types as f16; GPUs do not.
    """
    return sent_by(read(compiled))


def sent_by(hlo: Hlo) -> CollectiveBytes:
    """Return the collectives of a program that has been read."""
    found: list[Collective] = []
    for name, times in hlo.runs.items():
        for instruction in hlo.computations.get(name, {}).values():
            found += _parts(instruction, times, hlo)
    return CollectiveBytes(tuple(found))


def _parts(i: Instruction, times: int | None, hlo: Hlo) -> Iterator[Collective]:
    """Yield the parts of a collective, one for each dtype; nothing for other instructions."""
    kind = i.opcode.removesuffix("-start")
    if kind not in _SENT:
        return
    elements: dict[str, int] = collections.defaultdict(int)
    for array in arrays_in(_result_shapes(i.written, i.opcode)):
        elements[array.dtype] += array.size
    n = 2 if kind == "collective-permute" else _group_size(i.attributes, hlo.devices)
    for dtype, size in elements.items():
        sent = Array(dtype, (size,)).bytes * _SENT[kind](n)
        yield Collective(kind, dtype, size, n, sent, times, i.op_name, hlo.line_of(i))


def _result_shapes(result: str, op: str) -> str:
    """Return the shapes of an operation's results, without the operands of asynchronous starts.

    The start of an asynchronous operation returns ``(operands, results, ...)``, except that of an
    all-reduce, which may return its results alone.
    """
    result = re.sub(r"\{[^{}]*\}|/\*.*?\*/|\s", "", result)
    alone = op == "all-reduce-start" and not result.startswith("((")
    found = None if alone or not op.endswith("-start") else _RESULTS.match(result)
    return found[1] if found else result


def _group_size(rest: str, everyone: int) -> int:
    """Return the number of devices that exchange data; XLA writes groups in three ways."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        # Part of an axis is written 'name':(size before it)size.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in axes) if axes else everyone
    return everyone
