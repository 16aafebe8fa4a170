"""Check and time the tiles that a kernel may be cut into, and write the best to a table.

Needs a GPU. Every candidate first computes data of the shape that it is timed on, three times in
memory that held NaN, and must agree with a reference bit for bit; only then is it timed. One that
is wrong, does not compile, or hangs, is a line in the output. The table is JSON::

    {device kind: {kernel: {shape class: {"tiles": {...}, "ms": ..., "of": ..., "date": ...}}}}

where a shape class is ``MxNxK`` (``MxN`` of what is quantized), each rounded up to a power of two,
and ``of`` says which shape was measured. Lines of other devices, kernels and classes are kept.

    python benchmarks/tune_gpu.py                                # five candidates of each kernel
    python benchmarks/tune_gpu.py --shapes 4096x4096x4096 15872x16384x4096 --kernels running block
    python benchmarks/tune_gpu.py --candidates 20 --kernels running

Candidates are those that a model of the device predicts to be fastest. Each record is in
``runs/tune-<date>.jsonl``, and a best one in the table, as soon as it is made, whatever ends the
program.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from on_gpu.caches import RUNS, caches
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.clocks import clocks
from on_gpu.harness import supervise
from on_gpu.records import Record, append, replace

TABLE = Path(__file__).parent.parent / "jfp8" / "kernels" / "hopper" / "tuned.json"
PRODUCTS = ("running", "promoted", "block", "block_columns")
QUANTIZE = (
    "quantize_tensor",
    "quantize_lines",
    "quantize_rows_in_blocks",
    "quantize_tiles",
    "row_and_column_amax",
)


def shape_class(shape: tuple[int, ...]) -> str:
    """Each size rounded up to a power of two: ``(15872, 16384, 4096)`` is ``16384x16384x4096``."""
    return "x".join(str(1 << max(size - 1, 0).bit_length()) for size in shape)


# In the worker. What to tune is in `Settings.options`: {"kernels": [...], "shapes": [[m, n, k]],
# "candidates": of all kernels and shapes together}.


def tune(settings: Settings) -> Iterator[Group]:
    """Section: a group for each kernel and shape, a case for each candidate."""
    kernels, shapes = settings.options["kernels"], settings.options["shapes"]
    # Shapes that differ in n only are one to what quantizes.
    wanted = dict.fromkeys(
        (name, (m, n, k) if name in PRODUCTS else (m, k)) for m, n, k in shapes for name in kernels
    )
    left = settings.options["candidates"]
    for index, (name, shape) in enumerate(wanted):
        many = -(-left // (len(wanted) - index))
        left -= many
        make = _product_cases if name in PRODUCTS else _quantize_cases
        cases = list(make(name, shape, many, settings))
        yield Group(f"{name} {'x'.join(map(str, shape))}", cases)


def _case(
    cut: Any, check: Callable[[], Any], function: Any, arguments: Any, settings: Settings
) -> Case:
    from on_gpu.timing import chained

    def prepare() -> Timed:
        check()
        facts = {"checked": True, "tiles": dataclasses.asdict(cut)}
        return chained(function, arguments(), settings, **facts)

    return Case(str(cut), prepare)


def _product_cases(
    kind: Any, shape: tuple[int, ...], many: int, settings: Settings
) -> Iterator[Case]:
    import jax.numpy as jnp
    from on_gpu.checks import check_large, product, scales_of
    from on_gpu.timing import copies, random

    from jfp8.kernels.hopper.tiles import ranked

    m, n, k = shape
    f8, scales = jnp.float8_e4m3fn, scales_of(kind, m, n, k)
    operands = copies(
        lambda i: (random((m, k), f8, seed=2 * i), random((n, k), f8, seed=2 * i + 1), *scales),
        settings,
    )
    for tiles in ranked(kind, m, n, k)[:many]:
        check = functools.partial(check_large, kind, m, n, k, tiles)
        function = functools.partial(product, kind, tiles)
        yield _case(tiles, check, function, operands, settings)


def _quantize_cases(
    name: str, shape: tuple[int, ...], many: int, settings: Settings
) -> Iterator[Case]:
    import jax.numpy as jnp
    from on_gpu.timing import copies, random

    from jfp8.command_line import quantize_checks
    from jfp8.command_line.exactness import awkward, kernel
    from jfp8.scaling.formats import E4M3FN

    # What a check takes, and what is timed, after the matrix.
    options: dict[str, tuple[Any, ...]] = {
        "quantize_tensor": (E4M3FN, True),
        "quantize_lines": (E4M3FN,),
        "quantize_rows_in_blocks": (E4M3FN, 128, "power_of_two"),
        "quantize_tiles": (E4M3FN, "power_of_two"),
        "row_and_column_amax": (),
    }
    values = functools.cache(functools.partial(awkward, shape, jnp.bfloat16, 1))
    inputs = copies(lambda i: (random(shape, jnp.bfloat16, seed=i), jnp.float32(2)), settings)

    def quantize(sweep, x, scale):
        call = functools.partial(kernel(name), x, sweep=sweep)
        if name == "quantize_tensor":
            scale_of = quantize_checks.from_amax(E4M3FN)
            return call(scale.reshape(1), fmt=E4M3FN, scale_of=scale_of, with_amax=True)
        if name == "quantize_lines":
            return call(*(jnp.broadcast_to(scale, size) for size in x.shape), E4M3FN)
        return call(*options[name])

    def check(sweep):
        getattr(quantize_checks, f"check_{name}")(values(), *options[name], sweep)

    for sweep in _sweeps(name)[:many]:
        verify = functools.partial(check, sweep)
        yield _case(sweep, verify, functools.partial(quantize, sweep), inputs, settings)


_CUTS = [(128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (256, 128)]


def _sweeps(name: str) -> list[Any]:
    """Those that fit, the default first, then those with most bytes on their way from memory."""
    from jfp8.kernels.hopper.sweep import Sweep
    from jfp8.kernels.hopper.tiles import SHARED_MEMORY, multiprocessors

    # Blocks of 128 need tiles that hold whole ones.
    in_blocks = name in ("quantize_rows_in_blocks", "quantize_tiles")
    results = 0 if name == "row_and_column_amax" else 2  # bytes of an element, both directions
    found: list[tuple[int, Any]] = []
    for rows, columns in [(128, 128)] if in_blocks else _CUTS:
        for stages, blocks in itertools.product((2, 3, 4), (1, 2, 3)):
            incoming = blocks * rows * columns * 2 * stages
            if incoming + blocks * rows * columns * results < SHARED_MEMORY - 4096 * blocks:
                sweep = Sweep(rows, columns, stages, multiprocessors() * blocks)
                found.append((incoming, sweep))
    found.sort(key=lambda pair: (pair[1] != Sweep(), -pair[0]))
    return [sweep for _, sweep in found]


# In the supervisor.


def better(table: dict[str, Any], device: str, record: Record, started: str) -> bool:
    """Put `record` into `table` if it is the fastest of its class since `started`; was it put?

    Only what was checked, and is not of an earlier run, which may have had other clocks.
    """
    if "ms" not in record or not record.get("checked"):
        return False
    name, of = record["group"].split(" ")
    shape = tuple(int(size) for size in of.split("x"))
    lines = table.setdefault(device, {}).setdefault(name, {})
    old = lines.get(shape_class(shape))
    if old and old["date"] == started and old["ms"] <= record["ms"]:
        return False
    lines[shape_class(shape)] = {
        "tiles": record["tiles"],
        "ms": round(record["ms"], 5),
        "of": of,
        "date": started,
    }
    return True


def tune_into(
    table_file: Path,
    records_file: Path,
    settings: Settings,
    minutes: float = 8.75,
    log: Path | None = None,
    section: str = "tune_gpu:tune",
) -> list[Record]:
    """Run `section`, keep `records_file` and `table_file` up to date; returns all records."""
    table = json.loads(table_file.read_text()) if table_file.exists() else {}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = "unknown"

    def note(line: Record) -> None:
        nonlocal device
        append(records_file, line)
        if line["line"] == "worker" and (line["platform"] == "gpu" or settings.smoke):
            device = line["device"]
        if line["line"] == "record" and better(table, device, line, started):
            replace(table_file, json.dumps(table, indent=1, sort_keys=True) + "\n")

    kept = caches()
    print(f"records: {records_file}\ncompiled programs: {kept['JAX_COMPILATION_CACHE_DIR']}")
    note({"line": "run", "benchmark": "tiles", "smoke": settings.smoke, "date": started})
    outcome = supervise(
        {"tune": (section, 1.0)},
        settings,
        start="on_gpu.timing:begin",
        minutes=minutes,
        environment={**kept, **({"JAX_PLATFORMS": "cpu"} if settings.smoke else {})},
        log=log,
        watch=None if settings.smoke else clocks,
        note=note,
    )
    return outcome.records


def summary(records: list[Record]) -> Iterator[str]:
    """The best of each group, and what failed."""
    for group in dict.fromkeys(r["group"] for r in records if "ms" in r):
        own = sorted((r for r in records if r["group"] == group and "ms" in r), key=_ms)
        yield f"{group}: {own[0]['ms']:.4g} to {own[-1]['ms']:.4g} ms, best {own[0]['name']}"
    for r in records:
        if "error" in r:
            yield f"FAILED {r['group']} {r['name']}: {r['error'].splitlines()[0][:160]}"


def _ms(record: Record) -> float:
    return record["ms"]


def shape_of(text: str) -> list[int]:
    """``MxNxK`` as three numbers."""
    shape = [int(size) for size in text.split("x")]
    if len(shape) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MxNxK")
    return shape


def main() -> None:
    """Parse arguments, time, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = (*PRODUCTS, *QUANTIZE)
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[[8192, 8192, 8192]])
    parser.add_argument("--candidates", type=int, default=40, help="of all together (40)")
    parser.add_argument("--table", type=Path, default=TABLE, help="JSON file to add to")
    parser.add_argument("--records", type=Path, help="file to add records to (runs/tune-*)")
    parser.add_argument("--minutes", type=float, default=9.0, help="never more than this")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each candidate")
    parser.add_argument("--log", type=Path, help="file for what libraries print")
    parser.add_argument("--smoke", action="store_true", help="on a CPU, two candidates of each")
    arguments = parser.parse_args()
    options = {
        "kernels": list(arguments.kernels),
        "shapes": arguments.shapes,
        "candidates": arguments.candidates,
    }
    settings = Settings(repeats=arguments.repeats, warmups=2, options=options)
    if arguments.smoke:
        if arguments.table == TABLE:
            parser.error("--smoke needs a --table of its own: its times mean nothing")
        options |= {"shapes": [[128, 128, 128]], "candidates": 2 * len(arguments.kernels)}
        settings = Settings(True, 1, 0, compiling=600, running=600, options=options)
    now = datetime.datetime.now(datetime.UTC)
    records = arguments.records or RUNS / f"tune-{now:%Y-%m-%d-%H%M%S}.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    minutes = arguments.minutes - 0.25
    for line in summary(tune_into(arguments.table, records, settings, minutes, arguments.log)):
        print(line)


if __name__ == "__main__":
    main()
