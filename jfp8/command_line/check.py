"""``python -m jfp8 check``: run each kernel once on this GPU, and time layers of each recipe.

Takes some minutes. Afterwards jfp8 leaves out kernels that were wrong, hung or crashed, and chooses
between FP8 and bf16 by the times. It reads both from ~/.cache/jfp8 ($XDG_CACHE_HOME/jfp8), for this
kind of card and these versions of jfp8, JAX and CUDA.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pkgutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jfp8 import recipes
from jfp8.checkpoint.atomic import replace_file
from jfp8.command_line.child import ask
from jfp8.command_line.exactness import rehearsed
from jfp8.conversion.tables import table_lines
from jfp8.kernels.verdicts import RECIPES, verdict_file, versions
from jfp8.layers.linen.layers import Dense

HERE = "jfp8.command_line"
BF16 = "bf16"  # in place of a recipe: Flax's layer
# Layers that are timed: recipes, and numbers of tokens and features; the last one is narrow.
LAYERS = (BF16, *itertools.chain(*RECIPES.values()))
SIZES = ((1024, 1024), (8192, 8192), (32768, 1024))
CALLS, RUNS = (4, 12), 11
Result = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--kernels", nargs="+", metavar="NAME", help="check these alone; time and store nothing")
    add("--seconds", type=float, default=300.0, help="time limit of each kernel (default: 300)")


def run(
    options: argparse.Namespace, cases: str = f"{HERE}.cases:CASES"
) -> tuple[Result, list[str], bool]:
    """Return verdicts and times, the lines to print, and whether nothing is wrong."""
    card = ask(f"{HERE}.check:this_card", cases, limit=120)
    if card["failure"]:
        text = f"JAX does not start: {card['failure']}. Run `python -m jfp8 doctor`."
        return {"failure": text}, [text], False
    result: Result = {**card["result"], "versions": versions()}
    result["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    tasks = _chosen(result.pop("kernels"), options.kernels)
    with tempfile.TemporaryDirectory() as empty:  # without verdicts, which they would obey
        answers = {
            name: _answer("checked", {"cases": cases, "kernel": name}, options, empty)
            for name in tasks
        }
    result["kernels"] = {name: {"task": tasks[name], **answers[name]} for name in tasks}
    stores = bool(tasks) and not options.kernels
    trouble = _store(result) if stores else None
    if stores and not trouble and not result["interpreted"]:
        result["layers"] = {
            recipe: _answer("timed", {"recipe": recipe, "sizes": SIZES}, options)
            for recipe in LAYERS
        }
        trouble = _store(result)
    found = [*result["kernels"].values(), *result.get("layers", {}).values()]
    is_right = bool(tasks) and not trouble and not any(each["failure"] for each in found)
    why_not = "Only some were checked, so nothing is stored." if options.kernels else trouble
    return {**result, "not_stored": trouble}, list(lines(result, why_not)), is_right


def _chosen(known: dict[str, str], wanted: list[str] | None) -> dict[str, str]:
    if unknown := [name for name in wanted or () if name not in known]:
        raise SystemExit(
            f"This card has no kernel {', '.join(unknown)}; it has {', '.join(known)}."
        )
    return {name: task for name, task in known.items() if wanted is None or name in wanted}


def _answer(
    function: str, argument: Result, options: argparse.Namespace, cache: str | None = None
) -> Result:
    what = "kernel" if "kernel" in argument else "recipe"
    print(f"{what} {argument[what]} ... ", end="", file=sys.stderr, flush=True)
    environment = {} if cache is None else {"XDG_CACHE_HOME": cache}
    function = f"{HERE}.check:{function}"
    found = ask(function, argument, limit=options.seconds, environment=environment)
    print(f"{found['seconds']:.1f} s", file=sys.stderr, flush=True)
    result = found.pop("result") or {}
    return found | result


def _store(result: Result) -> str | None:
    """Write the file that planners read; returns why not, if that fails."""
    path = verdict_file(result["card"])
    try:
        if not path.is_absolute():
            raise OSError(f"{path} is not an absolute path")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1)
        replace_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        return (
            f"The verdicts cannot be written ({error}), so kernels that failed are still chosen. "
            "Set XDG_CACHE_HOME to a folder that you may write to, and check again."
        )
    return None


# In separate processes.


def this_card(cases: str) -> Result:
    """Return the first device, and its kernels with their tasks; on a CPU all that it rehearses."""
    table, device = pkgutil.resolve_name(cases), jax.devices()[0]
    is_gpu = device.platform == "gpu"
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if is_gpu else None
    found = {case.kernel: case.task for case in table if case.is_for(capability)}
    return {"card": device.device_kind, "interpreted": not is_gpu, "kernels": found}


def checked(argument: Result) -> Result:
    """Check one kernel, interpreted on a CPU; raises if it is wrong."""
    table = pkgutil.resolve_name(argument["cases"])
    (case,) = (case for case in table if case.kernel == argument["kernel"])
    with rehearsed():
        return {"measured": case.check(*case.arguments)}


def timed(argument: Result) -> Result:
    """Time layers of one recipe, of several sizes."""
    took = lambda m, n: microseconds(*layer(argument["recipe"], m, n))
    return {"us": {f"{m}x{n}": took(m, n) for m, n in argument["sizes"]}}


def layer(recipe: str, m: int, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the forward and backward pass of a layer of ``n x n``, and arguments of `m` tokens."""
    options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16}
    model = nn.Dense(n, **options)
    if recipe != BF16:
        model = Dense(n, recipe=recipes.get(recipe), **options)
    # Not zeros, on which tensor cores run faster.
    x = jax.random.normal(jax.random.key(0), (m, n), jnp.bfloat16)
    both = lambda variables, x, dy: jax.vjp(model.apply, variables, x)[1](dy)
    return both, (model.init(jax.random.key(0), x), x, x)


def microseconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Return the time of a call, the median of several runs.

    It is the difference between a long and a short program, since the host needs the same time to
    start either.
    """
    # Each call has parameters of its own, so that XLA does not merge them.
    program = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    few, many = (
        partial(program.lower(sets).compile(), sets)
        for sets in ([arguments] * count for count in CALLS)
    )
    times = [seconds(many) - seconds(few) for _ in range(RUNS)][1:]
    return max(1e6 * float(np.median(times)) / (CALLS[1] - CALLS[0]), 1e-3)


def seconds(run: Callable[[], Any]) -> float:
    """Return the time of one run."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def lines(result: Result, why_not_stored: str | None) -> Iterator[str]:
    """Yield the lines to print."""
    kernels, layers = result["kernels"], result.get("layers", {})
    how = ", where kernels are interpreted" if result["interpreted"] else ""
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    yield from [f"{result['card']}{how}; {versions}", ""]
    table = [("kernel", "for", "seconds", "verdict")]
    for name, found in kernels.items():
        row = name, found["task"], f"{found['seconds']:.1f}", _said(found, "right")
        table.append(row)
    yield from [*table_lines(table), ""]
    if layers:
        table = [("layer", "tokens x features: microseconds, forward and backward")]
        for recipe, found in layers.items():
            times = ", ".join(f"{size}: {us:.4g}" for size, us in found.get("us", {}).items())
            table.append((recipe, _said(found, times)))
        yield from [*table_lines(table), ""]
    failed = [name for name, found in kernels.items() if found["failure"]]
    if not kernels:
        yield "Nothing was checked: `python -m jfp8 doctor` says what is missing."
    elif failed:
        tasks = dict.fromkeys(kernels[name]["task"] for name in failed)
        yield f"{len(failed)} of {len(kernels)} kernels failed: {', '.join(failed)}."
        if not why_not_stored:
            yield f"jfp8 leaves out its kernels for {', '.join(tasks)} on this card."
    else:
        yield f"All {len(kernels)} kernels are right."
    if why_not_stored:
        yield why_not_stored
    elif kernels:
        yield f"Verdicts: {verdict_file(result['card'])}"


def _said(found: Result, otherwise: str) -> str:
    failure = found["failure"]
    return f"WRONG ({found['kind']}): {failure}"[:200] if failure else otherwise
