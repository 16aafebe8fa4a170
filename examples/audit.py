"""Count the matmuls, kernels and exchanges of a compiled program, and what it repeats.

    pathlib.Path("step.hlo").write_text(jax.jit(step).lower(*arguments).compile().as_text())

    python examples/audit.py step.hlo

The numbers are of one device. All collectives are listed at the end, with their bytes.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled.hlo import F8, Array, Hlo, Instruction, read
from compiled.sent import CollectiveBytes, sent_by

_SMALL = 1e6  # bytes
_COLLECTIVES = "all-|ragged-all-|reduce-scatter|collective-|async|partition-id|replica-id"
_DOTS = {"dot", "convolution", "scaled-dot", "ragged-dot"}
_FP8_LIBRARIES = {
    "__cublas$lt$matmul$f8": "FP8, cuBLASLt",
    "__cudnn$blockScaledDot": "FP8, cuDNN",
    "__cudnn$fmhaSoftmaxF8": "attention in FP8, cuDNN",
}


@dataclass(frozen=True)
class Matmuls:
    """Matmuls of one kind.

    Attributes:
      kind: dtype of the operands, for FP8 with its library: ``"FP8, cuBLASLt"``, ``"FP8, Pallas"``,
        ``"FP8, cuDNN"``, ``"f8, XLA"``, ``"bf16"``, ``"f32"``, ``"attention, cuDNN"``.
      count: executions.
      flops: 2 m k n for each; 0 for attention, of which the text does not tell.
    """

    kind: str
    count: int
    flops: float


@dataclass(frozen=True)
class Audit:
    """Result of `audit`; ``print`` it for a table. All counts are of one device.

    Attributes:
      matmuls: by kind.
      launches: kernels other than collectives.
      small_launches: kernels that read and write less than 1 MB, which take no time besides
        their launch.
      bytes_beside_matmuls: read and written by kernels that are no matmuls, without any cache.
      rounded_scales: single numbers, such as scales, that are rounded to 16 bits.
      f8_transposes: kernels that only write f8 values in another order.
      quantized_again: arrays that several kernels quantize, or one several times in a loop that
        does not change them; each with the number of times.
      sent: collectives.
      is_exact: False if a loop does not say how often it runs; then it counts once.
    """

    matmuls: tuple[Matmuls, ...]
    launches: int
    small_launches: int
    bytes_beside_matmuls: int
    rounded_scales: int
    f8_transposes: int
    quantized_again: tuple[tuple[str, int], ...]
    sent: CollectiveBytes
    is_exact: bool

    @property
    def flops(self) -> float:
        """Return the floating-point operations of all matmuls, without attention."""
        return sum(each.flops for each in self.matmuls)

    @property
    def small_collectives(self) -> int:
        """Return the executions of collectives that send less than 1 MB."""
        return sum(c.times or 1 for c in self.sent.collectives if c.bytes_once < _SMALL)

    def __str__(self) -> str:
        rows = [
            (f"matmuls, {m.kind}", f"{m.count:,}", f"{m.flops / 1e12:.4g} TFLOP" * (m.flops > 0))
            for m in self.matmuls
        ]
        beside = f"{self.bytes_beside_matmuls / 1e6:,.0f} MB beside matmuls"
        rows += [
            ("kernels", f"{self.launches:,}", beside),
            ("  below 1 MB", f"{self.small_launches:,}", ""),
            ("scalars rounded to 16 bits", f"{self.rounded_scales:,}", ""),
            ("transposes of f8 arrays", f"{self.f8_transposes:,}", ""),
        ]
        by_op: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for c in self.sent.collectives:
            by_op[f"{c.op}, {c.dtype}"][0] += c.times or 1
            by_op[f"{c.op}, {c.dtype}"][1] += c.bytes
        rows += [(op, f"{n:,}", f"{b / 1e6:,.1f} MB sent") for op, (n, b) in sorted(by_op.items())]
        rows += [("  below 1 MB", f"{self.small_collectives:,}", "")] * bool(by_op)
        rows.append(("arrays quantized more than once", f"{len(self.quantized_again):,}", ""))
        rows += [(f"  {name}", f"{times:,}", "times") for name, times in self.quantized_again]
        wide = max(len(row[0]) for row in rows)
        lines = [f"{name:<{wide}}  {n:>7}  {more}".rstrip() for name, n, more in rows]
        lines += ["Some loops do not say how often they run."] * (not self.is_exact)
        return "\n".join(lines)


def audit(compiled: Any) -> Audit:
    """Count what a compiled program, or its text, does on one device; ``print`` the result.

    Loops count as often as they run, both branches of a conditional count. It shows whether a whole
    training step has the matmuls that its layers promise, and what it does besides.
    """
    return audit_of(Launches(read(compiled)))


def audit_of(program: Launches) -> Audit:
    """Return the counts of a program that has been read."""
    times = program.hlo.times
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for name, kind in program.kinds.items():
        of_kind, instruction = found[kind], program.by_name[name]
        of_kind[0] += times(instruction)
        of_kind[1] += times(instruction) * program.flops(instruction)
    total = lambda instructions: sum(map(times, instructions))
    return Audit(
        tuple(Matmuls(kind, int(n), flops) for kind, (n, flops) in sorted(found.items())),
        total(i for i, _ in program.kernels),
        total(program.small_kernels),
        sum(n * times(i) for i, n in program.kernels if i.name not in program.kinds),
        total(program.rounded_scales),
        total(program.f8_transposes),
        program.quantized_again,
        sent_by(program.hlo),
        None not in program.hlo.runs.values(),
    )


class Launches:
    """The instructions that the program `hlo` launches on the device, and their arrays."""

    def __init__(self, hlo: Hlo):
        self.hlo = hlo
        self.launched = hlo.launched
        self.by_name = {i.name: i for i, _ in self.launched}

    def opcodes(self, kernel: Instruction) -> set[str]:
        """Return the opcodes of what a kernel computes."""
        return {i.opcode for i in self.hlo.inside(kernel)}

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Return the kind of each matmul, by the name of its instruction."""
        return {i.name: kind for i, _ in self.launched if (kind := self._kind(i))}

    def _kind(self, i: Instruction) -> str:
        if i.target in _FP8_LIBRARIES:
            return _FP8_LIBRARIES[i.target]
        if re.search("matmul|outer|attention", i.kernel):
            is_f8 = any(o.dtype in F8 for call in self._products(i) for o in self._operands(call))
            return "FP8, Pallas" if is_f8 else ""
        if i.target.startswith("__cudnn$fmha"):
            return "attention, cuDNN"
        library = re.match(r"__cublas|__cudnn", i.target)
        if not library and not _DOTS & self.opcodes(i):
            return "f8, XLA" if re.search(r"triton\w*gemm", i.attributes) else ""
        dtypes = self.factors(i)
        return next((t for t in ("f64", "f32", "bf16", "f16") if t in dtypes), "f8, XLA")

    def factors(self, matmul: Instruction) -> set[str]:
        """Return the types that a matmul multiplies, in a library or a kernel of XLA's."""
        return {o.dtype for i in self._products(matmul) for o in self._operands(i)[:2]}

    def _products(self, matmul: Instruction) -> list[Instruction]:
        """Return the dots that a matmul consists of, or the call that it is or wraps in slices."""
        parts = list(self.hlo.inside(matmul))
        dots = [i for i in parts if i.opcode in _DOTS]
        return dots or [i for i in parts if i.target] or [matmul]

    def _operands(self, i: Instruction) -> list[Array]:
        """Return the types of the operands that are single arrays."""
        body = self.hlo.computations[self.hlo.body_of[i.name]]
        return [body[name].results[0] for name in i.operands if body[name].results]

    def flops(self, matmul: Instruction) -> float:
        """Return the floating-point operations of a matmul; 0 for attention."""
        if "attention" in matmul.kernel or "fmha" in matmul.target:
            return 0.0
        return float(sum(map(self._flops_of_dot, self._products(matmul))))

    def _flops_of_dot(self, i: Instruction) -> float:
        """Return 2 m k n, and that for each of a batch."""
        lhs, rhs, *_ = self._operands(i)
        out = i.results[0]
        if found := re.search(r"lhs_contracting_dim\w+\W+([\d, \"]+)[\]}]", i.attributes):
            summed = map(int, re.findall(r"\d+", found[1]))
            return 2.0 * out.size * math.prod(lhs.shape[d] for d in summed)
        if labels := re.search(r"dim_labels=\w+_(\w+)->", i.attributes):
            return 2.0 * out.size * rhs.size / rhs.shape[labels[1].index("o")]
        # (m k)(k n)(m n) is the square of m k n, in batches or groups divided by their number.
        several = next((x.shape[0] for x in (rhs, out) if len(x.shape) > 2), 1)
        return 2.0 * math.sqrt(lhs.size * rhs.size * out.size / several)

    @functools.cached_property
    def kernels(self) -> list[tuple[Instruction, int]]:
        """Return the kernels other than collectives, with the bytes that each reads and writes."""
        return [
            (i, sum(a.bytes for x in (i, *operands) for a in x.results))
            for i, operands in self.launched
            if not is_collective(i)
        ]

    @functools.cached_property
    def small_kernels(self) -> list[Instruction]:
        """Return the kernels that take less than 1 MB, and so little time besides their launch."""
        return [i for i, size in self.kernels if size < _SMALL]

    @functools.cached_property
    def rounded_scales(self) -> list[Instruction]:
        """Return the single numbers that are rounded to 16 bits."""
        bodies = (self.hlo.computations.get(name, {}) for name in self.hlo.runs)
        converts = (i for body in bodies for i in body.values() if i.opcode == "convert")
        narrow = (i for i in converts if i.results[0].dtype in ("bf16", "f16"))
        return [i for i in narrow if i.results[0].size == 1]

    @functools.cached_property
    def f8_transposes(self) -> list[Instruction]:
        """Return the kernels that only write f8 values in another order."""
        return [
            i
            for i, operands in self.launched
            if "transpose" in self.opcodes(i) | set(re.findall(r"^\w*transpose", i.name))
            and any(r.dtype in F8 or r.dtype == "u8" for r in i.results)
            and all(o.results[0].bytes <= o.results[0].size for o in large(operands))
        ]

    @functools.cached_property
    def quantized_again(self) -> tuple[tuple[str, int], ...]:
        """Return the arrays that are quantized several times, with how often."""
        found: dict[tuple[Instruction, ...], int] = collections.defaultdict(int)
        for i, operands in self.launched:
            wide = [o for o in large(operands) if o.results[0].bytes > o.results[0].size]
            writes = any(r.dtype in F8 and r.size > 4096 for r in i.results)
            if wide and writes and i.name not in self.kinds and not is_collective(i):
                sources = tuple(map(self.hlo.source, wide))
                # A kernel that takes a slice itself takes another one in each iteration.
                is_same = all(map(self.hlo.is_invariant, sources))
                repeats = is_same and "dynamic-slice" not in self.opcodes(i)
                found[sources] += self.hlo.times(i) if repeats else 1
        return tuple((i.op_name or i.name, times) for (i, *_), times in found.items() if times > 1)


def is_collective(i: Instruction) -> bool:
    """Return whether an instruction exchanges data between devices."""
    return re.match(_COLLECTIVES, i.opcode) is not None


def large(operands: list[Instruction]) -> list[Instruction]:
    """Return operands that are no scales or other small things."""
    return [o for o in operands if len(o.results) == 1 and o.results[0].size > 4096]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the audit of a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="a file with its text, compiled.as_text()")
    found = audit(parser.parse_args(argv).program.read_text(encoding="utf-8"))
    print(found, found.sent, sep="\n\n")


if __name__ == "__main__":
    main()
