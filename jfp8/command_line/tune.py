"""``python -m jfp8 tune``: check and time the tiles that kernels may be cut into; keep the best.

Needs a Hopper GPU. Each candidate, in a separate process, first computes data of the shape that
it is timed on, and must agree with a reference bit for bit. Candidates are those that a model of
the device predicts to be fastest. Kernels look the best up in a table, which is JSON::

    {card: {kernel: {shape class: {"tiles": {...}, "us": ..., "of": ..., "date": ...}}}}

where a shape class is ``MxNxK`` (``MxN`` of what is quantized), each rounded up to a power of two,
and ``of`` says which shape was measured. Lines of other cards, kernels and classes are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.checkpoint.atomic import replace_file
from jfp8.command_line import quantize_checks
from jfp8.command_line.bench import Work, microseconds, random
from jfp8.command_line.child import ask
from jfp8.command_line.exactness import awkward, kernel, poisoned_runs, rehearsed
from jfp8.kernels.verdicts import shape_class
from jfp8.scaling.formats import E4M3FN

PRODUCTS = ("running", "promoted", "block", "block_columns")
# What quantizes, with what its check takes after the matrix.
QUANTIZE: dict[str, tuple[Any, ...]] = {
    "quantize_tensor": (E4M3FN, True),
    "quantize_lines": (E4M3FN,),
    "quantize_rows_in_blocks": (E4M3FN, 128, "power_of_two"),
    "quantize_tiles": (E4M3FN, "power_of_two"),
    "row_and_column_amax": (),
}
_CUTS = [(128, 128), (64, 128), (128, 64), (64, 64), (64, 256), (256, 128)]
Record = dict[str, Any]


def shape_of(text: str) -> tuple[int, ...]:
    """Return ``MxNxK`` as three numbers."""
    shape = tuple(int(size) if size.isdigit() else 0 for size in text.split("x"))
    if len(shape) != 3 or 0 in shape:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MxNxK")
    return shape


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    names = (*PRODUCTS, *QUANTIZE)
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(8192, 8192, 8192)])
    parser.add_argument("--candidates", type=int, default=5, help="of each kernel and shape (5)")
    table = Path(str(importlib.resources.files("jfp8.kernels.hopper"))) / "tuned.json"
    parser.add_argument("--table", type=Path, default=table, help="file to add to (the package's)")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU; needs a --table")


def run(
    options: argparse.Namespace, tried: str = "jfp8.command_line.tune:tried"
) -> tuple[Record, list[str], bool]:
    """Return all records, the lines to print, and whether every candidate was right."""
    if options.smoke and options.table.name == "tuned.json":
        text = "--smoke needs a --table of another name than tuned.json: its times mean nothing."
        return {"failure": text}, [text], False
    table = json.loads(options.table.read_text()) if options.table.exists() else {}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records = []
    shapes = [(128, 128, 128)] if options.smoke else options.shapes
    # Shapes that differ in n only are one to what quantizes.
    wanted = dict.fromkeys(
        (name, (m, n, k) if name in PRODUCTS else (m, k))
        for m, n, k in shapes
        for name in options.kernels
    )
    for (name, shape), index in itertools.product(wanted, range(options.candidates)):
        asked = {"kernel": name, "shape": shape, "index": index, "smoke": options.smoke}
        answer = ask(tried, asked)
        record = {**asked, **(answer.result or {"failure": answer.failure})}
        if "tiles" in record or "failure" in record:
            records.append(record)
        if better(table, record, started):
            text = json.dumps(table, indent=1, sort_keys=True) + "\n"
            replace_file(options.table, lambda file, text=text: file.write(text.encode()))
    is_right = bool(records) and not any("failure" in record for record in records)
    return {"date": started, "records": records}, list(lines(records)), is_right


def better(table: Record, record: Record, started: str) -> bool:
    """Put `record` into `table` if it is the fastest of its class since `started`; was it put?

    Not compared with an earlier run, which may have had other clocks.
    """
    if "us" not in record:
        return False
    lines = table.setdefault(record["card"], {}).setdefault(record["kernel"], {})
    old = lines.get(shape_class(tuple(record["shape"])))
    if old and old["date"] == started and old["us"] <= record["us"]:
        return False
    lines[shape_class(tuple(record["shape"]))] = {
        "tiles": record["tiles"],
        "us": round(record["us"], 3),
        "of": "x".join(map(str, record["shape"])),
        "date": started,
    }
    return True


def lines(records: list[Record]) -> Iterator[str]:
    """Yield the best of each kernel and shape, and what failed."""
    for name, shape in dict.fromkeys((r["kernel"], r["shape"]) for r in records if "us" in r):
        own = [r for r in records if (r["kernel"], r["shape"]) == (name, shape) and "us" in r]
        best = min(own, key=lambda r: r["us"])
        size = "x".join(map(str, shape))
        yield f"{name} {size}: {best['us']:.4g} us by {best['tiles']}, of {len(own)} candidates"
    for r in (r for r in records if "failure" in r):
        yield f"FAILED {r['kernel']}, candidate {r['index']}: {r['failure'][:160]}"


# In separate processes.


def tried(asked: Record) -> Record:
    """Check and time a candidate; returns {} if there are not so many."""
    name, shape = asked["kernel"], tuple(asked["shape"])
    candidates = _tiles(name, shape) if name in PRODUCTS else _sweeps(name)
    if asked["index"] >= len(candidates):
        return {}
    cut = candidates[asked["index"]]
    with rehearsed():
        if name in PRODUCTS:
            m, n, k = shape
            check_large(name, m, n, k, cut)
            operands = [random(size, k).astype(E4M3FN.dtype) for size in (m, n)]
            operands += scales_of(name, m, n, k)
            work = Work(functools.partial(product, name, cut), tuple(operands))
        else:
            x = awkward(shape, jnp.bfloat16, 1)
            getattr(quantize_checks, f"check_{name}")(x, *QUANTIZE[name], cut)
            work = Work(functools.partial(_quantize, name, cut), (random(*shape), jnp.float32(2)))
        us = microseconds(work, asked["smoke"])
    return {"card": jax.devices()[0].device_kind, "tiles": dataclasses.asdict(cut), "us": us}


def _tiles(name: Any, shape: tuple[int, ...]) -> list[Any]:
    from jfp8.kernels.hopper.tiles import ranked

    return ranked(name, *shape)


def _sweeps(name: str) -> list[Any]:
    """Return those that fit, the default first, then those with most bytes on their way."""
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


def _quantize(name: str, sweep: Any, x: jax.Array, scale: jax.Array) -> Any:
    call = functools.partial(kernel(name), x, sweep=sweep)
    if name == "quantize_tensor":
        scale_of = quantize_checks.from_amax(E4M3FN)
        return call(scale.reshape(1), fmt=E4M3FN, scale_of=scale_of, with_amax=True)
    if name == "quantize_lines":
        return call(*(jnp.broadcast_to(scale, size) for size in x.shape), E4M3FN)
    return call(*QUANTIZE[name])


def scales_of(kind: str, m: int, n: int, k: int) -> list[jax.Array]:
    """Return ones and twos as scales of blocks; for scales of whole operands, 2 and 1/4."""
    blocks = math.ceil(k / 128)
    sizes = {
        "block": ((blocks, m), (blocks, math.ceil(n / 128))),
        "block_columns": ((blocks, m), (blocks, n)),
    }.get(kind)
    if sizes is None:
        return [jnp.float32(2), jnp.float32(0.25)]
    return [
        jax.random.randint(jax.random.key(i), size, 1, 3).astype(jnp.float32)
        for i, size in enumerate(sizes)
    ]


def product(
    kind: str, tiles: Any, a: jax.Array, b: jax.Array, row: jax.Array, column: jax.Array
) -> jax.Array:
    """Return a `kind` of matmul by its kernel, as it is timed; in bf16."""
    if kind in ("block", "block_columns"):
        return kernel("block_matmul")(a, b, row, column, jnp.bfloat16, tiles=tiles)
    promote = kind == "promoted"
    return kernel("matmul")(a, b, row, column, jnp.bfloat16, promote=promote, tiles=tiles)


def check_large(kind: str, m: int, n: int, k: int, tiles: Any = None) -> Record:
    """Hold a matmul of integers at a size that is timed, and so with its tiles, to XLA's in bf16.

    Both are exact: all sums stay below 2^13.
    """
    keys = jax.random.split(jax.random.key(2))
    a, b = (
        jax.random.randint(key, (size, k), -2, 3).astype(E4M3FN.dtype)
        for key, size in zip(keys, (m, n), strict=True)
    )
    scales = scales_of(kind, m, n, k)

    @jax.jit
    def differ(a, b, row, column, y):
        a, b = (x.astype(jnp.bfloat16) for x in (a, b))
        if row.ndim:
            a = a * jnp.repeat(row.T, 128, 1)[:, :k].astype(jnp.bfloat16)
            column = column.T if kind == "block_columns" else jnp.repeat(column.T, 128, 0)[:n]
            b = b * jnp.repeat(column, 128, 1)[:, :k].astype(jnp.bfloat16)
        scale = 1 if row.ndim else row * column
        expected = jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(~(y == (expected * scale).astype(jnp.bfloat16)))  # NaN too

    for y in poisoned_runs(functools.partial(product, kind, tiles), a, b, *scales):
        if wrong := int(differ(a, b, *scales, y)):
            raise AssertionError(f"{wrong} of {m * n} differ")
    return {}
