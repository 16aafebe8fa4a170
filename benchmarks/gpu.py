"""Check the GPU kernels, and measure their speed; one command, one GPU.

Correctness first: every kernel against float64 or, bit for bit, against a CPU. Then
ceilings of the device, FP8 matmuls, Transformer layers alone at their own clock, linear layers,
quantize kernels, a Transformer block's step, attention by cuDNN, experts, fusions, accumulation
errors, and XLA's compilation of FP8. Sections are independent: a failure in one is a line in the
result, and a kernel that hangs is ended without harm to the others.

    python benchmarks/gpu.py                       # all, into runs/gpu-<date>.jsonl
    python benchmarks/gpu.py --sections products,linear --records runs/h200.jsonl --hlo programs
    python benchmarks/gpu.py --sections alone --groups "7B block, step" --minutes 1
    python benchmarks/gpu.py --table runs/h200.jsonl
    python benchmarks/gpu.py --table runs/h200.jsonl --summary benchmarks/results/gpu_h200.json
    python benchmarks/gpu.py --smoke               # on a CPU, with kernels interpreted: minutes

Each record is written to the file immediately, however the program ends. With an existing file,
only missing and failed records are measured: repeat the command to continue after the time limit.
After a change of a kernel use a new file. The table is made from the file alone.
`benchmarks/fifteen_minutes.sh` has the calls for a card that is lent for a quarter of an hour. The
package has to be importable, installed or by PYTHONPATH. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import sys
from pathlib import Path

from on_gpu.caches import RUNS, caches
from on_gpu.cases import Settings
from on_gpu.clocks import clocks
from on_gpu.harness import supervise
from on_gpu.records import append, load, measured
from on_gpu.summary import write
from on_gpu.tables import complete, table

# Most important first. The numbers are shares of the time, of which none lacks what it leaves over.
SECTIONS = {
    "checks": ("on_gpu.checks:checks", 20.0),
    "ceilings": ("on_gpu.products:ceilings", 5.0),
    "products": ("on_gpu.products:products", 22.0),
    "alone": ("on_gpu.steps:alone", 20.0),
    "linear": ("on_gpu.linear:linear", 20.0),
    "quantize": ("on_gpu.quantize:quantize", 10.0),
    "block": ("on_gpu.steps:block", 18.0),
    "attention": ("on_gpu.attention:attention", 10.0),
    "experts": ("on_gpu.experts:experts", 18.0),
    "fusions": ("on_gpu.fusions:fusions", 24.0),
    "accumulation": ("on_gpu.products:accumulation", 5.0),
    "facts": ("on_gpu.products:facts", 4.0),
}
# For a smoke test: nothing there runs long enough to be worth optimising.
ON_CPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}


def measure(
    sections: list[str], settings: Settings, minutes: float, log: Path | None, records: Path
) -> None:
    """Run `sections`, and write each record to the file `records`."""
    kept = caches()
    done = measured(records)
    note = functools.partial(append, records)
    run = {
        "benchmark": "GPU kernels",
        "smoke": settings.smoke,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {
            "sections": sections,
            "groups": settings.groups,
            "minutes": minutes,
            "repeats": settings.repeats,
            "warmups": settings.warmups,
        },
    }
    note({"line": "run", **run})
    print(f"records: {records}" + (f", which has {len(done)}" if done else ""), flush=True)
    print(f"compiled programs: {kept['JAX_COMPILATION_CACHE_DIR']}", flush=True)
    supervise(
        {name: SECTIONS[name] for name in sections},
        settings,
        start="on_gpu.timing:begin",
        minutes=minutes,
        environment={**kept, **(ON_CPU if settings.smoke else {})},
        log=log,
        watch=None if settings.smoke else clocks,
        note=note,
        measured=done,
    )


def records_file(smoke: bool) -> Path:
    """Return a file below ``runs``, with the time in its name."""
    now = datetime.datetime.now(datetime.UTC)
    return RUNS / f"{'smoke' if smoke else 'gpu'}-{now:%Y-%m-%d-%H%M%S}.jsonl"


def sections_of(text: str) -> list[str]:
    """Return the sections in a list such as ``products,linear``."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no section is called {', '.join(unknown)}; there are {', '.join(SECTIONS)}"
        )
    return [name for name in SECTIONS if name in names]


def main() -> None:
    """Parse arguments, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", type=sections_of, default=list(SECTIONS), help="a,b,c")
    parser.add_argument("--groups", default="", help="pattern of the names of their groups")
    parser.add_argument("--minutes", type=float, default=None, help="never more than this (9)")
    parser.add_argument("--repeats", type=int, default=None, help="timed runs of each line (20)")
    parser.add_argument("--records", type=Path, help="file to begin or continue (runs/gpu-*)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of FILE only")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="add the times to FILE, JSON")
    parser.add_argument("--hlo", type=Path, help="folder for the compiled programs of layers")
    parser.add_argument("--log", type=Path, help="file for the output of libraries")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU, kernels interpreted")
    arguments = parser.parse_args()
    path = arguments.table or arguments.records or records_file(arguments.smoke)
    if not arguments.table:
        path.parent.mkdir(parents=True, exist_ok=True)
        repeats = arguments.repeats or (1 if arguments.smoke else 20)
        hlo = str(arguments.hlo) if arguments.hlo else None
        settings = Settings(repeats=repeats, hlo=hlo, groups=arguments.groups)
        if arguments.smoke:
            limits = {"warmups": 0, "compiling": 600, "running": 600}
            settings = dataclasses.replace(settings, smoke=True, **limits)
        # Without the seconds that starting and ending takes, the whole stays below the limit.
        minutes = (arguments.minutes or (30 if arguments.smoke else 9)) - 0.25
        measure(arguments.sections, settings, minutes, arguments.log, path)
    result = complete(load(path))
    print(table(result), flush=True)
    if arguments.summary:
        write(arguments.summary, path.stem, result)
    if any(r["section"] == "checks" and "error" in r for r in result["records"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
