"""Compute what a lane computes for itself: instructions from registers to registers."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ptx.parser import UNSIGNED, Instruction, Registers, vector

F32, F64 = np.float32, np.float64
TYPES = {
    "f32": F32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16, "s16x2": np.int16, "u16x2": np.uint16,
    "e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "pred": np.bool_,
    **{f"{kind}{bits}": UNSIGNED[bits] for kind in "ub" for bits in (8, 16, 32, 64)},
}  # fmt: skip
Run = Callable[[list[Any]], None]


def bits_of(kind: str) -> int:
    """Return the bits of a register of this type."""
    size = 8 * np.dtype(TYPES[kind]).itemsize
    return 1 if kind == "pred" else size * (2 if kind.endswith("x2") else 1)


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind not in "iub"


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)


def _shifted(x: np.ndarray, by: np.ndarray, shift: Any) -> np.ndarray:
    """Return `x` shifted: by its width or more, nothing is left but signs."""
    bits = 8 * x.itemsize
    by = by.astype(np.int64)
    kept = shift(x, np.minimum(by, bits - 1).astype(x.dtype))
    return kept if x.dtype.kind == "i" else np.where(by >= bits, x.dtype.type(0), kept)


def _product(a: np.ndarray, b: np.ndarray, part: str) -> np.ndarray:
    if _is_float(a) or part not in ("wide", "hi"):
        return a * b
    kind, bits = a.dtype.kind, 8 * a.itemsize
    if bits == 64:
        return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b)]).astype(a.dtype)
    whole = a.astype(f"{kind}{bits // 4}") * b.astype(f"{kind}{bits // 4}")
    return whole if part == "wide" else (whole >> bits).astype(a.dtype)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, op: list[str]) -> np.ndarray:
    exact = a.astype(F64) * b + c
    near = exact.astype(F32)
    if "rm" in op:
        return np.where(near > exact, np.nextafter(near, F32(-np.inf)), near)
    return near


def _largest(a: np.ndarray, b: np.ndarray, op: list[str]) -> np.ndarray:
    smallest = op[0] == "min"
    if _is_float(a) and "NaN" not in op:
        return (np.fmin if smallest else np.fmax)(a, b)
    found = (np.minimum if smallest else np.maximum)(a, b)
    return np.maximum(found, a.dtype.type(0)) if "relu" in op else found


def _divided(a: np.ndarray, b: np.ndarray, op: list[str]) -> np.ndarray:
    if _is_float(a):
        return a / b
    whole = np.trunc(a.astype(F64) / b).astype(a.dtype)  # 32 bits at most
    return whole if op[0] == "div" else a - whole * b


def _field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return bits of `x`, with their sign if it is signed."""
    bits = 8 * x.itemsize
    left = bits - (start + length).astype(np.int64)
    x = _shifted(x, left, np.left_shift)
    return _shifted(x, bits - length.astype(np.int64), np.right_shift)


def _permuted(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """Return four of the eight bytes of `a` and `b`, each named by four bits of `select`."""
    assert not (select & 0x8888).any()  # the sign of a byte instead
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    names = np.stack([select.astype(np.uint64) >> 4 * i & 7 for i in range(4)])
    places = 8 * np.arange(4, dtype=np.uint64)[:, None]
    return np.sum((both >> 8 * names & 255) << places, axis=0).astype(a.dtype)


def _sign(x: np.ndarray, change: Callable[..., np.ndarray]) -> np.ndarray:
    """Change the bit of the sign; of NaN, too."""
    bits = UNSIGNED[8 * x.itemsize]
    return change(x.view(bits), bits(1 << 8 * x.itemsize - 1)).view(x.dtype)


# By name: a function of operands of the instruction's type, and of its parts.
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b, op: a + b,
    "sub": lambda a, b, op: a - b,
    "mul": lambda a, b, op: _product(a, b, op[1]),
    "mad": lambda a, b, c, op: _product(a, b, op[1]).view(c.dtype) + c,
    "fma": _fma,
    "max": _largest,
    "min": _largest,
    "div": _divided,
    "rem": _divided,
    "and": lambda a, b, op: a & b,
    "or": lambda a, b, op: a | b,
    "xor": lambda a, b, op: a ^ b,
    "not": lambda a, op: ~a,
    "neg": lambda a, op: _sign(a, lambda x, sign: x ^ sign) if _is_float(a) else -a,
    "abs": lambda a, op: _sign(a, lambda x, sign: x & ~sign) if _is_float(a) else np.abs(a),
    "shl": lambda a, b, op: _shifted(a, b, np.left_shift),
    "shr": lambda a, b, op: _shifted(a, b, np.right_shift),
    "bfe": lambda a, b, c, op: _field(a, b, c),
    "prmt": lambda a, b, c, op: _permuted(a, b, c),
    "copysign": lambda a, b, op: np.copysign(b, a),
    "ex2": lambda a, op: np.exp2(a),
    "lg2": lambda a, op: np.log2(a),
    "rcp": lambda a, op: F32(1) / a,
}
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "leu": lambda a, b: ~np.greater(a, b),
}  # fmt: skip


def arithmetic(instruction: Instruction, at: Registers) -> tuple[Run, list[int]] | None:
    """Return what runs an instruction on a list of registers, and which it writes; None: other."""
    op, operands = instruction.op.split("."), instruction.operands
    if op[0] in SPECIAL:
        return SPECIAL[op[0]](op, operands, at)
    if op[0] not in FUNCTIONS:
        return None
    function, kind, bits = FUNCTIONS[op[0]], TYPES[op[-1]], bits_of(op[-1])
    wide = bits * 2 if "wide" in op else bits
    out, sources = at(operands[0]), []
    for i, operand in enumerate(operands[1:]):
        if op[0] in ("shl", "shr", "bfe") and i > 0:  # bits are counted by words
            sources.append((at(operand, 32), np.uint32))
        elif op[0] == "mad" and i == 2:
            sources.append((at(operand, wide), UNSIGNED[wide]))
        else:
            sources.append((at(operand, bits), kind))
    flushed = _flushed if "ftz" in op else lambda x: x

    def run(r: list[Any]) -> None:
        values = [flushed(r[x].view(kind)) for x, kind in sources]
        r[out] = flushed(function(*values, op)).view(UNSIGNED[wide])

    return run, [out]


def _mov(op: list[str], operands: tuple[str, ...], at: Registers) -> tuple[Run, list[int]]:
    """Move; or take a register to pieces, or put it together, the lowest piece first."""
    bits = bits_of(op[-1])
    outs, sources = map(vector, operands)
    if len(outs) > 1:
        kind, source = UNSIGNED[bits // len(outs)], at(sources[0], bits)
        kept = [(i, at(out)) for i, out in enumerate(outs) if out != "_"]

        def run(r: list[Any]) -> None:
            pieces = r[source].view(kind).reshape(32, -1)
            for i, out in kept:
                r[out] = pieces[:, i].copy()

        return run, [out for _, out in kept]
    out = at(outs[0])
    if len(sources) > 1:
        pieces = [at(x, bits // len(sources)) for x in sources]

        def run(r: list[Any]) -> None:
            r[out] = np.stack([r[x] for x in pieces], 1).view(UNSIGNED[bits])[:, 0]

        return run, [out]
    source = at(sources[0], bits)

    def run(r: list[Any]) -> None:
        r[out] = r[source].copy()

    return run, [out]


def _selp(op: list[str], operands: tuple[str, ...], at: Registers) -> tuple[Run, list[int]]:
    out, choice = at(operands[0]), at(operands[3])
    a, b = (at(x, bits_of(op[-1])) for x in operands[1:3])

    def run(r: list[Any]) -> None:
        r[out] = np.where(r[choice], r[a], r[b])

    return run, [out]


def _setp(op: list[str], operands: tuple[str, ...], at: Registers) -> tuple[Run, list[int]]:
    compare, kind = COMPARE[op[1]], TYPES[op[-1]]
    outs = [at(x) for x in operands[0].split("|")]
    a, b = (at(x, bits_of(op[-1])) for x in operands[1:3])
    other = at(operands[3]) if len(operands) > 3 else None  # another predicate

    def run(r: list[Any]) -> None:
        found = compare(r[a].view(kind), r[b].view(kind))
        if other is not None:
            found = FUNCTIONS[op[2]](found, r[other], op)
        found = found.reshape(32, -1)
        for i, out in enumerate(outs):
            r[out] = found[:, i].copy()

    return run, outs


def _cvt(op: list[str], operands: tuple[str, ...], at: Registers) -> tuple[Run, list[int]]:
    kinds = [x for x in op if x in TYPES]
    to, of = (TYPES[x] for x in kinds)
    stored = UNSIGNED[bits_of(kinds[0])]
    out, sources = at(operands[0]), [at(x, bits_of(kinds[1])) for x in operands[1:]]
    convert = _conversion(op, of, to)

    def run(r: list[Any]) -> None:
        # The first of two becomes the upper half.
        parts = [convert(r[x].view(of)) for x in reversed(sources)]
        values = parts[0] if len(parts) == 1 else np.stack(parts, 1)
        r[out] = np.ascontiguousarray(values).view(stored).reshape(32)

    return run, [out]


def _conversion(op: list[str], of: Any, to: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that converts one value of each lane."""
    if "satfinite" in op:
        most = F32(ml_dtypes.finfo(to).max)
        # Both formats have the code 0x7f for NaN.
        nan = np.uint8(0x7F).view(to)
        return lambda x: np.where(np.isnan(x), nan, np.clip(x, -most, most).astype(to))
    if "sat" in op:
        return lambda x: np.where(np.isnan(x), F32(0), np.clip(x, F32(0), F32(1)))
    assert not {"rni", "rmi", "rpi", "rzi"} & set(op), op
    return lambda x: x.astype(to)


SPECIAL = {"mov": _mov, "cvta": _mov, "selp": _selp, "setp": _setp, "cvt": _cvt}
