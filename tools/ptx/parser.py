"""Read PTX as compilers print it: one kernel, its instructions, and its registers by numbers."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ptx.memory import REGION, SHARED, SPACING
from ptx.text import read

LANES = np.arange(32)
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# The content of a register before it is written; a constant, so that runs are alike.
UNWRITTEN = 0xAAAA_5555_AAAA_5555


class Instruction(NamedTuple):
    """Hold one instruction: ``@!predicate op operands;``."""

    text: str
    op: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool


class Kernel(NamedTuple):
    """Hold a kernel: its instructions, and where labels are among them."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    widths: dict[str, int]  # bits of registers, by their name or, of numbered ones, its beginning


def parse(text: str) -> Kernel:
    """Return the only kernel of a module."""
    text = re.sub(r"//[^\n]*|^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    header, _, body = text.partition(".entry")[2].partition("{")
    names: list[dict[str, str]] = [{}]  # for each open scope, its names and their replacements
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    widths: dict[str, int] = {}
    scopes = 0
    for part in _statements(body):
        if part == "{":
            scopes += 1
            names.append({"label": f"@{scopes}"})
        elif part == "}":
            names.pop()
            if not names:
                break
        elif part.startswith(".reg"):
            _, kind, name = part.split(None, 2)
            stem = re.sub(r"<\d+>$", "", name.strip())
            if len(names) > 1:
                names[-1][stem] = f"{stem}@{scopes}."
            widths[_resolved(stem, names)] = 1 if kind == ".pred" else int(kind[2:])
        elif part.endswith(":"):
            labels[_label(part[:-1], names)] = len(instructions)
        elif not part.startswith("."):
            instructions.append(_instruction(part, names))
    return Kernel(header.split("(")[0].strip(), instructions, labels, widths)


def _statements(body: str) -> list[str]:
    """Split into instructions, labels, and the braces of scopes; others belong to operands."""
    pattern = r"\s*([$\w]+:(?!:)|[{}]|[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*;)"
    return [" ".join(m[1].rstrip(";").split()) for m in re.finditer(pattern, body)]


def _label(name: str, names: list[dict[str, str]]) -> str:
    """Return what a label means: compilers' own ones begin with a dollar, and belong to all."""
    return name if name.startswith("$") else name + names[-1]["label"]


def _resolved(name: str, names: list[dict[str, str]]) -> str:
    """Return what a name means in the innermost scope that has it, numbered registers included."""
    for scope in reversed(names):
        stem = re.sub(r"\d+$", "", name)
        for known in (name, stem):
            if known in scope:
                return scope[known] + name[len(known) :]
    return name


def _instruction(part: str, names: list[dict[str, str]]) -> Instruction:
    guard, op, rest = read(r"^(?:@(!?\S+)\s+)?(\S+)\s*(.*)", part).groups()
    if op.startswith("bra"):
        rest = _label(rest, names)
    else:
        rest = re.sub(r"[A-Za-z_$%][\w$.]*", lambda m: _resolved(m[0], names), rest)
    negated = bool(guard) and guard[0] == "!"
    predicate = guard and _resolved(guard.lstrip("!"), names)
    return Instruction(part, op, tuple(_operands(rest)), predicate, negated)


def _operands(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    return [m.strip() for m in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text)]


def vector(operand: str) -> list[str]:
    """Return the members of ``{a, b}``, or the operand alone."""
    return [x.strip() for x in operand.strip("{}").split(",")]


# Registers


def constant(value: int, bits: int) -> np.ndarray:
    """Return a number in all lanes."""
    return np.full(32, value & ((1 << bits) - 1), UNSIGNED[bits])


class Registers:
    """Map names and numbers to places in a list, of which `initial` is the first content."""

    def __init__(self, widths: dict[str, int]):
        self.widths = widths
        self.places: dict[tuple[str, int], int] = {}
        self.initial: list[np.ndarray] = []

    def __call__(self, operand: str, bits: int = 32) -> int:
        """Return the place of a register, or of a number with so many bits."""
        width = self._width(operand)
        key = (operand, width or bits)
        if key not in self.places:
            self.places[key] = len(self.initial)
            first = UNWRITTEN if width else _number(operand)
            self.initial.append(constant(first, key[1]))
        return self.places[key]

    def is_register(self, operand: str) -> bool:
        return self._width(operand) is not None

    def _width(self, operand: str) -> int | None:
        if re.match(r"%(n?ctaid|tid|cluster_)", operand):
            return 32
        for name in (operand, re.sub(r"\d+$", "", operand)):
            if name in self.widths:
                return self.widths[name]
        return None


def _number(operand: str) -> int:
    if operand.startswith(("0f", "0d")):
        return int(operand[2:], 16)
    if operand == "__dynamic_shmem__0":
        return SHARED
    if found := re.search(r"_param_(\d+)$", operand):
        return REGION + int(found[1]) * SPACING
    return int(operand, 0)
