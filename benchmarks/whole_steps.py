"""Model the time of whole training steps on Hopper, in bf16 and in FP8, from compiled programs.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/whole_steps.py FOLDER
    ... benchmarks/whole_steps.py FOLDER --only "one GPU" --recipes delayed current

Needs what `.ci/compile_for_gpus` installs, and no GPU. Each program is compiled once, for an H200:
its text stays in FOLDER, and later runs read it. Kernels and collectives run one after the other::

    a kernel        2.5 us + max(operations / rate, bytes / 3.0 TB/s)
    a collective    2.5 us + bytes / 350 GB/s

Rates of matmuls, attention and memory are an H100's (benchmarks/results/gpu_h100.json), so kernels
bound by memory are faster on an H200. Launches and collectives were not measured. Amaxes that a
delayed recipe finds in its first step alone cost a launch.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import math
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import flax
import jax
from results_file import write

import jfp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from gpu_programs import why_not
from support.compiled import Instruction, Launches, audit_of, read
from support.whole_steps import PROGRAMS, TOKENS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "whole_steps.json"
LAUNCH, MEMORY, WIRE = 2.5e-6, 3.0e12, 350e9  # seconds, bytes a second, bytes a second
# Operations a second, as measured in linear layers of 8192^3 and in attention of 2,048 tokens.
BF16_RATE, FP8_RATE, BLOCK_RATE, ATTENTION_RATE = 700e12, 1350e12, 960e12, 413e12


def text_of(folder: Path, name: str, recipe: str) -> tuple[str, float]:
    """Return the text of a compiled program, and the seconds of CPU time to trace and compile it.

    Reads both from `folder`, or writes both there.
    """
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.{recipe}.hlo"
    if not path.exists():
        began = time.process_time()
        text = PROGRAMS[name].compile(None if recipe == "bf16" else recipe).hlo.hlo.text
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n// seconds: {time.process_time() - began:.1f}\n")
    text, _, seconds = path.read_text().rpartition("// seconds: ")
    return text, float(seconds)


def moved(program: Launches, i: Instruction, size: int) -> int:
    """Return the bytes that a kernel moves: of arrays that it slices or updates, only parts."""
    if i.kernel == "jfp8_tensor_amax":  # reads nothing once a history has an entry
        return 0
    for part in program.hlo.inside(i):
        body = program.hlo.computations[program.hlo.body_of[part.name]]
        sizes = [sum(a.bytes for a in body[name].results) for name in part.operands]
        if part.opcode == "dynamic-slice":
            size -= sizes[0] - part.results[0].bytes
        elif part.opcode == "dynamic-update-slice":
            size -= 2 * (sizes[0] - sizes[1])
    return max(size, 0)


def operations(program: Launches, i: Instruction) -> float:
    """Return the operations of a matmul; for causal attention half of those of all scores."""
    if "attention" not in i.kernel and "fmha" not in i.target:
        return program.flops(i)
    _, operands = next(each for each in program.launched if each[0] is i)
    (batch, *sizes, depth) = operands[0].results[0].shape
    scores = batch * math.prod(sizes) * TOKENS / 2
    matmuls = 5 if re.search("Backward", i.target) else 2
    return 2.0 * matmuls * scores * depth


def rate(kind: str, kernel: str) -> float:
    """Return the operations a second of a matmul, by its kind and the name of its kernel."""
    if "attention" in kind:
        return ATTENTION_RATE
    in_fp8 = BLOCK_RATE if "block_matmul" in kernel else FP8_RATE
    return in_fp8 if "FP8" in kind else BF16_RATE


def seconds(program: Launches) -> dict[str, float]:
    """Return the time of a program by its parts."""
    parts: dict[str, float] = collections.defaultdict(float)
    for i, size in program.kernels:
        kind, times = program.kinds.get(i.name, ""), program.hlo.times(i)
        transfer = moved(program, i, size) / MEMORY
        if kind:
            multiplying = operations(program, i) / rate(kind, i.kernel)
            parts["matmuls"] += times * max(multiplying, transfer)
        else:
            parts["memory"] += times * transfer
        parts["launches"] += times * LAUNCH
    for c in audit_of(program).sent.collectives:
        parts["wire"] += c.bytes / WIRE
        parts["launches"] += (c.times or 1) * LAUNCH
    return dict(parts)


def row(text: str, compiling: float) -> dict[str, Any]:
    """Return what the table says of a program."""
    program = Launches(read(text))
    audit, parts = audit_of(program), seconds(program)
    sent: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for c in audit.sent.collectives:
        entry = sent[f"{c.op} {c.dtype}"]
        entry[0] += c.times or 1
        entry[1] = round(entry[1] + c.bytes / 1e6, 1)
    return {
        "ms": round(1e3 * sum(parts.values()), 2),
        "parts": {name: round(1e3 * s, 2) for name, s in parts.items()},
        "matmuls": {m.kind: m.count for m in audit.matmuls},
        "launches": audit.launches,
        "small": audit.small_launches,
        "f8 transposes": audit.f8_transposes,
        "MB beside matmuls": round(audit.bytes_beside_matmuls / 1e6),
        "collectives": dict(sent),
        "small collectives": audit.small_collectives,
        "quantized again": [times for _, times in audit.quantized_again],
        "rounded scales": audit.rounded_scales,
        "compiling": compiling,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the figures of all programs as Markdown."""
    head = ["program", "recipe", "ms", "over bf16", "matmuls", "launches (small)", "f8 transposes"]
    head += ["MB", "MB sent", "small collectives", "quantized again", "compiling"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, by_recipe in results.items():
        plain = by_recipe["bf16"]
        for recipe, r in by_recipe.items():
            kinds = " + ".join(f"{n} {kind}" for kind, n in r["matmuls"].items())
            cells = [name, recipe, f"{r['ms']:.2f}", f"{plain['ms'] / r['ms']:.2f}", kinds]
            cells += [f"{r['launches']} ({r['small']})", r["f8 transposes"], r["MB beside matmuls"]]
            cells += [f"{sum(b for _, b in r['collectives'].values()):.0f}", r["small collectives"]]
            cells += [r["quantized again"] or 0, f"{r['compiling'] / plain['compiling']:.1f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="texts of compiled programs")
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--recipes", nargs="+", default=["delayed", "current"])
    parser.add_argument("--write", action="store_true", help=f"add to {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    results: dict[str, dict[str, Any]] = {}
    for name in args.only:
        for recipe in ("bf16", *args.recipes):
            results.setdefault(name, {})[recipe] = row(*text_of(args.folder, name, recipe))
            print(f"{name}, {recipe}: {results[name][recipe]}", file=sys.stderr, flush=True)
    print(table(results))
    if args.write:
        versions = {m.__name__: m.__version__ for m in (jax, flax, jfp8)}
        versions = {"python": platform.python_version(), **versions}
        known = json.loads(RESULTS.read_text())["programs"] if RESULTS.exists() else {}
        programs = {name: known.get(name, {}) | results.get(name, {}) for name in PROGRAMS}
        programs = {name: found for name, found in programs.items() if found}
        date = f"{datetime.date.today()}"
        record = {"device": "described H200", "made": date, "versions": versions}
        record["programs"] = programs
        write(RESULTS, record)


if __name__ == "__main__":
    main()
