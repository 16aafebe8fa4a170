"""``python -m jfp8 bench``: rates of this card, large and small, in one file to send.

Each rate is measured in a separate process. A program has several calls, each with parameters of
its own; the time of one is the difference between a long and a short program. Only that of a
launch shows what the host needs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jfp8 import recipes
from jfp8.checkpoint.atomic import replace_file
from jfp8.command_line.child import ask, compiled
from jfp8.command_line.exactness import rehearsed
from jfp8.conversion.tables import table_lines
from jfp8.kernels.verdicts import bench_file, verdicts, versions
from jfp8.layers.linen.layers import Dense
from jfp8.matmul.scaled_matmul import scaled_matmul
from jfp8.products.flash.dot_product import scaled_dot_product_attention
from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.quantization import quantize

Result = dict[str, Any]
_LAST = (((1,), (1,)), ((), ()))  # contracting the last dimension of both
LAUNCHES = 64


class Work(NamedTuple):
    """Hold what is timed: a function, its arguments, and what it takes at least."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float = 0
    bytes: float = 0
    launches: int = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, help="file to write (jfp8-bench-CARD.json)")
    parser.add_argument("--smoke", action="store_true", help="tiny, for a rehearsal on a CPU")


def run(options: argparse.Namespace) -> tuple[Result, list[str], bool]:
    """Return the rates, the lines to print, and whether all were measured and written."""
    card = ask("jfp8.command_line.bench:this_card", starting=120)
    rates: Result = {}
    for name, (_, large, small) in WORK.items():
        for n in (16,) if options.smoke else (large, small):
            asked = {"name": name, "n": n, "smoke": options.smoke}
            answer = ask("jfp8.command_line.bench:measured", asked)
            rates[f"{name}, {n}"] = answer.result or {"failure": answer.failure}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"smoke": options.smoke, "date": now, **(card.result or {}), "rates": rates}
    default = "jfp8-bench-" + re.sub(r"\W+", "-", str(result.get("card", "unknown"))) + ".json"
    path, text = (options.out or Path(default)).absolute(), json.dumps(result, indent=1)
    said = f"Written: {path}"
    try:
        replace_file(path, lambda file: file.write(text.encode()))
        if result.get("platform") == "gpu" and not options.smoke:
            cached = bench_file(str(result["card"]))
            cached.parent.mkdir(parents=True, exist_ok=True)
            replace_file(cached, lambda file: file.write(text.encode()))
            said += f"\njfp8 chooses by these times on this card from now on: {cached}"
    except OSError as error:
        said = f"Not written ({error}): name another file with --out, or print it with --json."
    failed = [name for name, rate in rates.items() if "failure" in rate]
    is_right = not failed and not card.failure and said.startswith("Written")
    return result, [*lines(result), "", said], is_right


def lines(result: Result) -> Iterator[str]:
    """Yield a line for each rate."""
    table = [["", "µs", "TFLOP/s", "GB/s"]]
    for name, rate in result["rates"].items():
        if why := rate.get("failure") or rate.get("skipped"):
            table.append([name, why[:100], "", ""])
        else:
            of = (rate["us"], rate["tflops"], rate["gbs"])
            table.append([name, *(f"{x:.4g}" if x else "" for x in of)])
    yield from table_lines(table)
    if result["smoke"]:
        yield "A rehearsal: the times mean nothing."


# In separate processes.


def this_card(_: None) -> Result:
    """Return the first device, what is installed, and the verdicts on its kernels."""
    device = jax.devices()[0]
    return {
        "card": device.device_kind,
        "platform": device.platform,
        "versions": versions(),
        "verdicts": verdicts(device.device_kind),
    }


def measured(asked: Result) -> Result:
    """Return microseconds and rates of one kind of work, or why this device does not do it."""
    make = WORK[asked["name"]][0]
    try:
        with rehearsed():
            work = make(asked["n"])
            us = microseconds(work, asked["smoke"]) / work.launches
    except NotImplementedError as error:
        return {"skipped": str(error)}
    return {"us": us, "tflops": work.flops / us / 1e6, "gbs": work.bytes / us / 1e3}


def microseconds(work: Work, smoke: bool) -> float:
    """Return the time of a call: the slope between programs of many and of few."""
    counts = (0, 1) if smoke else (4, 12)
    program = jax.jit(lambda sets: [work.function(*arguments) for arguments in sets])
    runs = [
        functools.partial(program.lower(sets).compile(), sets)
        for sets in ([work.arguments] * count for count in counts)
    ]
    compiled()
    times = []
    for _ in range(1 if smoke else 11):
        few, many = map(_seconds, runs)
        times.append(1e6 * (many - few) / (counts[1] - counts[0]))
    return max(float(np.median(times[-10:])), 1e-3)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def random(*shape: int) -> jax.Array:
    """Return values in bf16: on zeros, tensor cores run faster than on data."""
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)


def matmul(is_fp8: bool, n: int) -> Work:
    """Return an n x n x n matmul, in bf16 or of FP8 operands with a scale each."""
    x = random(n, n)
    if not is_fp8:
        return Work(jnp.dot, (x, x), 2 * n**3)
    multiply = functools.partial(
        scaled_matmul, dimension_numbers=_LAST, preferred_element_type=jnp.bfloat16
    )
    return Work(multiply, (quantize(x, E4M3FN),) * 2, 2 * n**3)


def layer(recipe: str | None, n: int) -> Work:
    """Return an n x n layer of n tokens, forward and backward; without a recipe Flax's in bf16."""
    options: Any = {"use_bias": False, "dtype": jnp.bfloat16}
    model = nn.Dense(n, **options)
    if recipe is not None:
        model = Dense(n, recipe=recipes.get(recipe), **options)
    x = random(n, n)
    both = lambda variables, x, dy: jax.vjp(model.apply, variables, x)[1](dy)
    return Work(both, (model.init(jax.random.key(0), x), x, x), 6 * n**3)


def launches(n: int) -> Work:
    """Return many small kernels, each of which waits for the one before."""
    product = lambda x: functools.reduce(lambda y, _: jnp.tanh(y @ x), range(LAUNCHES), x)
    return Work(product, (random(n, n),), launches=LAUNCHES)


def attention(is_fp8: bool, n: int) -> Work:
    """Return causal attention of 16 heads of 128 numbers over n tokens; in bf16 by cuDNN."""
    q, attend = random(1, n, 16, 128), scaled_dot_product_attention
    if not is_fp8:
        by = "cudnn" if jax.default_backend() == "gpu" else "xla"
        attend = functools.partial(jax.nn.dot_product_attention, implementation=by)
    return Work(functools.partial(attend, is_causal=True), (q, q, q), 2 * 16 * 128 * n * n)


def grouped(n: int) -> Work:
    """Return matmuls of n tokens with the n x n matrices of 8 groups."""
    sizes = jnp.full((8,), n // 8, jnp.int32)
    multiply = functools.partial(scaled_ragged_dot, recipe=recipes.get("block"))
    return Work(multiply, (random(n, n), random(8, n, n), sizes), 2 * n**3)


# Each kind of work, and its sizes: large and small.
WORK: dict[str, tuple[Callable[[int], Work], int, int]] = {
    "copy": (lambda n: Work(lambda x: -x, (random(n, n),), 0, 4 * n * n), 16384, 1024),
    "launch": (launches, 128, 128),
    "quantize": (lambda n: Work(lambda x: quantize(x, E4M3FN), (random(n, n),)), 16384, 1024),
    "matmul, bf16": (functools.partial(matmul, False), 8192, 1024),
    "matmul, FP8": (functools.partial(matmul, True), 8192, 1024),
    "layer, bf16": (functools.partial(layer, None), 8192, 1024),
    **{
        f"layer, {name}": (functools.partial(layer, name), 8192, 1024)
        for name in ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
    },
    "attention, bf16": (functools.partial(attention, False), 8192, 1024),
    "attention, FP8": (functools.partial(attention, True), 8192, 1024),
    "grouped": (grouped, 8192, 1024),
}
