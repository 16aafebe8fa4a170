"""Time the tiles that a kernel may be cut into, and write the best to a table; needs a GPU.

A candidate that does not compile, or hangs, is a line in the output. The table is JSON::

    {device kind: {kernel: {shape class: {"tiles": {...}, "ms": ..., "of": ..., "date": ...}}}}

where a shape class is ``MxNxK`` (``MxN`` of what is quantized), each rounded up to a power of two,
and ``of`` says which shape was measured. Lines of other devices, kernels and classes are kept.

    python benchmarks/tune_gpu.py --shapes 8192x8192x8192 4096x4096x4096 15872x16384x4096
    python benchmarks/tune_gpu.py --kernels block quantize_both --minutes 5
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_harness import Case, Group, Record, Settings, Timed, supervise

TABLE = Path(__file__).parent.parent / "jfp8" / "matmul" / "hopper" / "tuned.json"
PRODUCTS = ("running", "promoted", "block", "block_columns")
QUANTIZE = ("quantize_both", "quantize_rows_in_blocks", "quantize_tiles", "row_and_column_amax")
SHAPES = ("8192x8192x8192", "15872x16384x4096", "4096x4096x4096")


def shape_class(shape: tuple[int, ...]) -> str:
    """Each size rounded up to a power of two: ``(15872, 16384, 4096)`` is ``16384x16384x4096``."""
    return "x".join(str(1 << max(size - 1, 0).bit_length()) for size in shape)


# In the worker. What to tune is in `Settings.options`: {"kernels": [...], "shapes": [[m, n, k]]}.


def tune(settings: Settings) -> Iterator[Group]:
    """Section: a group for each kernel and shape, a case for each candidate."""
    done = set()
    for m, n, k in settings.options["shapes"]:
        for name in settings.options["kernels"]:
            shape = (m, n, k) if name in PRODUCTS else (m, k)
            if (name, shape) in done:  # shapes that differ in n only
                continue
            done.add((name, shape))
            make = _product_cases if name in PRODUCTS else _quantize_cases
            yield Group(f"{name} {'x'.join(map(str, shape))}", list(make(name, shape, settings)))


def _case(function: Callable[..., Any], cut: Any, arguments: Any, settings: Settings) -> Case:
    from gpu_timing import chained

    def prepare() -> Timed:
        called = functools.partial(function, cut)
        return chained(called, arguments(), settings, tiles=dataclasses.asdict(cut))

    return Case(str(cut), prepare)


def _product_cases(kind: Any, shape: tuple[int, ...], settings: Settings) -> Iterator[Case]:
    import jax.numpy as jnp
    from gpu_checks import kernel
    from gpu_timing import copies, random

    from jfp8.matmul.hopper.tiles import candidates

    m, n, k = shape
    f8, blocks = jnp.float8_e4m3fn, -(-k // 128)
    scale_shapes = {
        "block": ((blocks, m), (blocks, -(-n // 128))),
        "block_columns": ((blocks, m), (blocks, n)),
    }.get(kind, ((), ()))
    scales = [jnp.full(s, 0.5, jnp.float32) for s in scale_shapes]
    operands = copies(
        lambda i: (random((m, k), f8, seed=2 * i), random((n, k), f8, seed=2 * i + 1), *scales),
        settings,
    )

    def product(tiles, a, b, row, column):
        if kind in ("block", "block_columns"):
            return kernel("block_matmul")(a, b, row, column, jnp.bfloat16, tiles=tiles)
        promote = kind == "promoted"
        return kernel("matmul")(a, b, row, column, jnp.bfloat16, promote=promote, tiles=tiles)

    for tiles in candidates(kind)[: 1 if settings.smoke else None]:
        yield _case(product, tiles, operands, settings)


def _quantize_cases(name: str, shape: tuple[int, ...], settings: Settings) -> Iterator[Case]:
    import jax.numpy as jnp
    from gpu_checks import kernel
    from gpu_timing import copies, random

    from jfp8.matmul.hopper.quantize import Sweep
    from jfp8.matmul.hopper.tiles import multiprocessors
    from jfp8.scaling.formats import E4M3FN

    inputs = copies(lambda i: (random(shape, jnp.bfloat16, seed=i), jnp.float32(2)), settings)

    def quantize(sweep, x, scale):
        arguments: dict[str, tuple[Any, ...]] = {
            "quantize_both": (scale, scale, E4M3FN),
            "quantize_rows_in_blocks": (E4M3FN, 128, "power_of_two"),
            "quantize_tiles": (E4M3FN, "power_of_two"),
            "row_and_column_amax": (),
        }
        options = {"with_amax": True} if name == "quantize_both" else {}
        return kernel(name)(x, *arguments[name], sweep=sweep, **options)

    # Blocks of 128 need tiles that hold whole ones. What finds no room does not compile.
    in_blocks = name in ("quantize_rows_in_blocks", "quantize_tiles")
    found = [
        Sweep(rows, columns, stages, multiprocessors() * blocks)
        for rows, columns in ([(128, 128)] if in_blocks else _CUTS)
        for stages in (2, 3, 4)
        for blocks in (1, 2, 3)
    ]
    for sweep in found[: 1 if settings.smoke else None]:
        yield _case(quantize, sweep, inputs, settings)


_CUTS = [(128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (256, 128)]


# In the supervisor.


def best_of(records: list[Record]) -> dict[str, Record]:
    """The fastest candidate of each group."""
    best: dict[str, Record] = {}
    for record in records:
        group = record["group"]
        if "ms" in record and (group not in best or record["ms"] < best[group]["ms"]):
            best[group] = record
    return best


def merged(table: dict[str, Any], device: str, records: list[Record]) -> dict[str, Any]:
    """`table` with the best candidates of `records` in it."""
    kernels = table.setdefault(device, {})
    for group, record in best_of(records).items():
        name, of = group.split(" ")
        shape = tuple(int(size) for size in of.split("x"))
        kernels.setdefault(name, {})[shape_class(shape)] = {
            "tiles": record["tiles"],
            "ms": round(record["ms"], 5),
            "of": of,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
    return table


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
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[*map(shape_of, SHAPES)])
    parser.add_argument("--table", type=Path, default=TABLE, help="JSON file to add to")
    parser.add_argument("--minutes", type=float, default=9.0, help="never more than this")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each candidate")
    parser.add_argument("--log", type=Path, help="file for what libraries print")
    parser.add_argument("--smoke", action="store_true", help="on a CPU, one candidate of each")
    arguments = parser.parse_args()
    options = {"kernels": list(arguments.kernels), "shapes": arguments.shapes}
    settings = Settings(repeats=arguments.repeats, warmups=2, options=options)
    if arguments.smoke:
        options["shapes"] = [[128, 128, 128]]
        settings = Settings(True, 1, 0, compiling=600, running=600, options=options)
    outcome = supervise(
        {"tune": ("tune_gpu:tune", 1.0)},
        settings,
        start="gpu_timing:begin",
        minutes=arguments.minutes - 0.25,
        environment={"JAX_PLATFORMS": "cpu"} if arguments.smoke else None,
        log=arguments.log,
    )
    device = outcome.hello.get("device", "unknown")
    if outcome.hello.get("platform") == "gpu" or arguments.smoke:
        old = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
        new = merged(old, device, outcome.records)
        arguments.table.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    for group, record in best_of(outcome.records).items():
        times = sorted(r["ms"] for r in outcome.records if r["group"] == group and "ms" in r)
        print(f"{group}: {record['ms']:.4g} to {times[-1]:.4g} ms, best {record['name']}")
    failed = [r for r in outcome.records if "error" in r]
    for r in failed:
        print(f"FAILED {r['group']} {r['name']}: {r['error'].splitlines()[0][:160]}")


if __name__ == "__main__":
    main()
