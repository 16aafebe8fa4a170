"""Multiply tiles in shared memory: products of a warpgroup, which end some time after they began.

PTX lets each warp wait for its own quarter of the rows. If the quarters end together is not said:
`collective` products need all warps and end at once, others each for itself.
"""

import re

import numpy as np

from ptx.arithmetic import F32, TYPES
from ptx.events import grouped
from ptx.memory import Fault
from ptx.parser import LANES, Instruction, Registers, vector
from ptx.warp import Act, Warp

VALUES = {
    kind: np.arange(256, dtype=np.uint8).view(kind).astype(F32)
    for kind in (TYPES["e4m3x2"], TYPES["e5m2x2"])
}
SWIZZLES = {1: 128, 2: 64, 3: 32}  # bytes, by the code in a descriptor


def swizzled(at: np.ndarray, swizzle: int) -> np.ndarray:
    """Return where the bytes are that would be `at` these places without a swizzle."""
    return at ^ ((at >> 7 & swizzle // 16 - 1) << 4) if swizzle else at


def rows_of(descriptor: int, rows: np.ndarray) -> np.ndarray:
    """Return the addresses of 32 bytes of each row of a K-major tile."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    swizzle = SWIZZLES[descriptor >> 62]
    at = start + rows // 8 * stride + rows % 8 * swizzle
    return swizzled(at[:, None] + np.arange(32), swizzle)


def wgmma(instruction: Instruction, at: Registers) -> Act | None:
    """Return what runs an instruction of wgmma; None: it is another."""
    op = instruction.op.split(".")
    if op[0] != "wgmma":
        return None
    if op[1] == "fence":
        return _fence
    if waits := grouped(instruction.op, instruction.operands, "products"):
        return waits
    return _multiply(op, instruction.operands, at)


def _fence(warp: Warp, lanes: np.ndarray) -> None:
    warp.fenced = list(warp.registers)


def _multiply(op: list[str], operands: tuple[str, ...], at: Registers) -> Act:
    (columns,) = (int(m[1]) for x in op if (m := re.fullmatch(r"m64n(\d+)k32", x)))
    kinds = [TYPES[f"{x}x2"] for x in op[-2:]]
    sums = [at(x) for x in vector(operands[0])]
    a, b, adds = at(operands[1], 64), at(operands[2], 64), at(operands[3])
    # Lane l has rows l // 4 and 8 more, and of each 8 columns two.
    i = np.arange(len(sums))
    row = LANES // 4 + (8 * (i % 4 // 2))[:, None]
    column = 2 * (LANES % 4) + (8 * (i // 4) + i % 2)[:, None]

    def start(warp: Warp, lanes: np.ndarray) -> None:
        r, shared = warp.registers, warp.block.shared
        quarter = 16 * (warp.number % 4) + np.arange(16)
        places = rows_of(int(r[a][0]), quarter), rows_of(int(r[b][0]), np.arange(columns))
        add = bool(r[adds][0])
        changed = [x for x in sums if not warp.fenced or r[x] is not warp.fenced[x]]
        if add and not set(changed) <= set(warp.in_flight):
            raise Fault("adds to registers that were written since the last wgmma.fence")
        warp.in_flight.update(sums)
        for at in places:
            shared.will_read(at)

        def multiply() -> None:
            codes = (shared.read(at, "a product") for at in places)
            x, y = (VALUES[kind][each] for kind, each in zip(kinds, codes, strict=True))
            found = (x @ y.T)[row, column]  # f32[registers, lanes]
            for register, new in zip(sums, found, strict=True):
                new = new + r[register].view(F32) if add else new
                r[register] = warp.fenced[register] = new.view(np.uint32)
            warp.in_flight.subtract(sums)
            warp.in_flight += {}  # without those of none

        warp.products.begun.append(warp.block.product(warp, multiply))

    return start
