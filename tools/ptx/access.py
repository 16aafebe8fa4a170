"""Load and store: of a lane its own, and 8x8 matrices of 16 bits together."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.arithmetic import TYPES, bits_of
from ptx.memory import REGION, Fault
from ptx.parser import UNSIGNED, Instruction, Registers, vector
from ptx.text import read
from ptx.warp import Act, Warp


def address(operand: str, at: Registers) -> Callable[[list[Any]], np.ndarray]:
    """Return the function from registers to the addresses of ``[register + offset]``."""
    name, offset = read(r"^\[\s*([^+\]\s]+)\s*(?:\+\s*(-?\d+))?\s*\]$", operand).groups()
    place, offset = at(name, 64), int(offset or 0)
    return lambda r: r[place].astype(np.int64) + offset


def access(instruction: Instruction, at: Registers) -> Act | None:
    """Return what runs a load or a store; None: it is neither."""
    op = instruction.op.split(".")
    if op[0] not in ("ld", "st", "ldmatrix", "stmatrix"):
        return None
    loads = op[0].startswith("ld")
    values, place = instruction.operands if loads else instruction.operands[::-1]
    if op[0].endswith("matrix"):
        return _matrices(op, loads, [at(x) for x in vector(values)], address(place, at))
    bits = bits_of(op[-1])
    registers = [at(x, max(bits, 16)) for x in vector(values)]
    kinds = [at.initial[x].dtype for x in registers]
    where = address(place, at)
    size = bits // 8 * len(registers)
    kind = TYPES[op[-1]]

    def places(warp: Warp, lanes: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return a memory, and the bytes of each lane there."""
        first = where(warp.registers)[lanes]
        if (first % size).any():
            raise Fault("the address is not a multiple of the size")
        memory = warp.block.memory if first[0] >= REGION else warp.block.shared
        return memory, first[:, None] + np.arange(size)

    def load(warp: Warp, lanes: np.ndarray) -> None:
        memory, at = places(warp, lanes)
        found = memory.load(at).view(kind)
        for i, (register, to) in enumerate(zip(registers, kinds, strict=True)):
            content = warp.registers[register].copy()
            content[lanes] = found[:, i].astype(to)  # a register may be wider
            warp.registers[register] = content

    def store(warp: Warp, lanes: np.ndarray) -> None:
        content = np.stack([warp.registers[x][lanes].astype(UNSIGNED[bits]) for x in registers], 1)
        memory, at = places(warp, lanes)
        memory.store(at, content.view(np.uint8), warp.number)

    return load if loads else store


def _matrices(op: list[str], loads: bool, registers: list[int], where: Any) -> Act:
    """Each 8 lanes hold the addresses of the rows of a matrix; a lane holds two neighbors."""
    transposed, row = "trans" in op, np.arange(16)

    def turned(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.T) if transposed else x

    def run(warp: Warp, lanes: np.ndarray) -> None:
        r, shared, rows = warp.registers, warp.block.shared, where(warp.registers)
        for i, register in enumerate(registers):
            at = rows[8 * i : 8 * i + 8, None] + row
            if loads:
                matrix = turned(np.ascontiguousarray(shared.load(at)).view(np.uint16))
                r[register] = matrix.view(np.uint32).reshape(32)
            else:
                matrix = turned(r[register].copy().view(np.uint16).reshape(8, 8))
                shared.store(at, matrix.view(np.uint8), warp.number)

    return run
