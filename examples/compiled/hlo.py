"""Read the text of a compiled program: its instructions, and how often each of them runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

F8 = ("f8e4m3fn", "f8e5m2")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_LOCATION = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
_LATER = re.compile(r"-(done|update)$")  # names what its start has called
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
# Without cost on the device: names for parts or other views of arrays.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
_FREE |= {"call", "after-all", "partition-id", "opt-barrier"}


@dataclass(frozen=True)
class Array:
    """The type of an array: ``bf16[8192,4096]``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        digits = re.search(r"\d+", self.dtype)
        return -(-self.size * (int(digits[0]) if digits else 8) // 8)  # pred has none


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: ``%name = results opcode(operands), attributes``.

    Attributes:
      results: all arrays in `written`.
      written: the text of the results.
      attributes: without the code of a kernel.
    """

    name: str
    results: tuple[Array, ...]
    written: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def target(self) -> str:
        """Return the library routine that a custom call calls, "" if it is none."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Return JAX's name, such as ``"jit(step)/shard_map/all_gather"``."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def kernel(self) -> str:
        """Return the name of a Pallas kernel, "" if it is none."""
        if self.target == "tpu_custom_call":
            return re.sub(r"\.\d+$", "", self.name)
        found = re.search(r"(\w+)/(mpmd_map|custom_partitioning)$", self.op_name)
        return found[1] if found and self.target.startswith("mosaic_gpu") else ""

    @property
    def part(self) -> int | None:
        """Return which part of a tuple a ``get-tuple-element`` names."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found and self.opcode == "get-tuple-element" else None

    def calls(self, *keys: str) -> list[str]:
        """Return the names of the computations under attributes `keys`."""
        pattern = rf"\b(?:{'|'.join(keys)})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))"
        found = re.findall(pattern, self.attributes)
        return [name for several, one in found for name in re.findall(r"[\w.\-]+", several or one)]


class Hlo:
    """A compiled program.

    Attributes:
      computations: their instructions by name, the entry computation last among equals.
      entry: the name of the computation that runs first.
      body_of: the computation of each instruction.
      devices: number of devices it was compiled for.
      text: the program.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.body_of: dict[str, str] = {}
        self.entry = name = ""
        self.text = text
        lines = text.splitlines()
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", lines[0] if lines else "")
        self.devices = math.prod(map(int, counts))
        for line in lines:
            if header := _COMPUTATION.match(line):
                name = header[2]
                self.computations[name] = {}
                self.entry = name if header[1] else self.entry
            elif name and (found := _INSTRUCTION.match(line)):
                instruction = _parse(found[2], found[3])
                self.computations[name][instruction.name] = instruction
                self.body_of[instruction.name] = name
                if found[1]:
                    self.roots[name] = instruction

    @functools.cached_property
    def runs(self) -> dict[str, int | None]:
        """Return the executions of each computation that runs; None in a loop of unknown length."""
        times: dict[str, int | None] = {}

        def visit(name: str, count: int | None) -> None:
            before = times.get(name, 0)
            times[name] = None if before is None or count is None else before + count
            for i in self.computations.get(name, {}).values():
                if _LATER.search(i.opcode):
                    continue
                inside = count
                if i.opcode == "while":
                    trips = _TRIP_COUNT.search(i.attributes)
                    inside = None if trips is None or count is None else count * int(trips[1])
                for callee in i.calls("body", "condition", "calls", "to_apply", *_BRANCHES):
                    visit(callee, inside)

        visit(self.entry, 1)
        return times

    def times(self, instruction: Instruction) -> int:
        """Return how often an instruction runs; a loop of unknown length has one iteration."""
        return self.runs.get(self.body_of[instruction.name], 0) or 1

    @functools.cached_property
    def launched(self) -> list[tuple[Instruction, list[Instruction]]]:
        """Return every kernel once, with the instructions that its operands name."""
        found, entered = [], [self.entry]
        for name in entered:
            body = self.computations[name]
            begun = {i.operands[0] for i in body.values() if _LATER.search(i.opcode)}
            for i in (self._whole(i) for i in body.values() if i.name not in begun):
                called = i.calls("body", "condition", *_BRANCHES)
                called += i.calls("to_apply") if i.opcode == "call" else []
                entered += [each for each in called if each not in entered]
                if i.opcode not in _FREE:
                    found.append((i, [body[operand] for operand in i.operands]))
        return found

    def _whole(self, i: Instruction) -> Instruction:
        """Return a kernel together with its start, and with the call that it wraps in slices."""
        body = self.computations[self.body_of[i.name]]
        start = body[i.operands[0]] if _LATER.search(i.opcode) else i
        opcode = start.opcode.removesuffix("-start")
        # The end has the name and the results that other instructions use.
        whole = replace(start, name=i.name, results=i.results, written=i.written, opcode=opcode)
        calls = [c.attributes for c in self.inside(whole) if c.target and opcode == "fusion"]
        return replace(whole, attributes=", ".join([*calls, start.attributes]))

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions that a kernel consists of."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for name in instruction.calls("calls"):
            for i in self.computations[name].values():
                yield from self.inside(i)

    def source(self, instruction: Instruction) -> Instruction:
        """Return the kernel, parameter, or part of either, that `instruction` is a name for."""
        if instruction.opcode not in ("get-tuple-element", "bitcast", "opt-barrier"):
            return instruction
        body = self.computations[self.body_of[instruction.name]]
        whole = self.source(body[instruction.operands[0]])
        if instruction.part is None or whole.opcode != "tuple":
            return whole if instruction.part is None else instruction
        return self.source(body[whole.operands[instruction.part]])

    def is_invariant(self, instruction: Instruction) -> bool:
        """Return whether this is a parameter, or a part of one, that no iteration changes."""
        name = self.body_of[instruction.name]
        root = self.roots[name]
        of = [self.computations[name][operand].opcode for operand in instruction.operands]
        if instruction.part is None or root.opcode != "tuple" or of != ["parameter"]:
            return False
        kept = self.source(self.computations[name][root.operands[instruction.part]])
        return (kept.operands, kept.part) == (instruction.operands, instruction.part)

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """Return ``file:line`` by ``stack_frame_id``, from the tables at the head."""
        head = self.text.partition("FunctionNames")[0]
        files = dict(re.findall(r'^(\d+) "(.*)"$', head, re.MULTILINE))
        found = re.findall(_LOCATION, self.text, re.MULTILINE)
        places = {number: f"{files.get(file, '?')}:{line}" for number, file, line in found}
        frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", self.text, re.MULTILINE)
        return {frame: places[number] for frame, number in frames if number in places}

    def line_of(self, instruction: Instruction) -> str:
        """Return ``file:line`` of the source, "" if it is not known."""
        older = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if older:
            return f"{older[1]}:{older[2]}"
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self._sources.get(found[1], "") if found else ""


def read(compiled: Any) -> Hlo:
    """Read a program, ``jax.jit(f).lower(...).compile()``, or its text."""
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    if not text.lstrip().startswith("HloModule"):
        raise ValueError(
            "The text of a compiled program starts with 'HloModule', but this one with "
            f"{text.lstrip()[:40]!r}. Collectives and kernels are only known after compiling: pass "
            "jax.jit(f).lower(...).compile()."
        )
    return Hlo(text)


def arrays_in(text: str) -> tuple[Array, ...]:
    """Return all array types in a text."""
    return tuple(
        Array(dtype, tuple(map(int, filter(None, shape.split(",")))))
        for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    )


def _parse(name: str, text: str) -> Instruction:
    """Read ``results opcode(operands), attributes``; results may be in parentheses."""
    end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
    start = text.index("(", end)
    stop = _closing(text, start)
    operands = tuple(re.findall(r"%([\w.\-]+)", text[start:stop]))
    attributes = text[stop + 1 :].partition(', module = "')[0]  # without a kernel
    written, opcode = text[:end], text[end:start].strip()
    return Instruction(name, arrays_in(written), written, opcode, operands, attributes)


def _closing(text: str, start: int) -> int:
    """Return the place of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"no closing parenthesis: {text[:80]}")
