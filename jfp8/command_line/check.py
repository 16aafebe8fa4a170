"""``python -m jfp8 check``: run a small case of each kernel in a separate process.

Its result is held to a reference. Planners leave out the kernels that are wrong, hang or crash: the
verdict is stored in the user's cache directory, for this kind of card and these versions.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from jfp8.checkpoint.atomic import replace_file
from jfp8.command_line.child import ask
from jfp8.command_line.exactness import rehearsed
from jfp8.conversion.tables import table_lines
from jfp8.kernels.verdicts import verdict_file, versions

CASES = "jfp8.command_line.cases:CASES"
Result = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--kernels", nargs="+", metavar="NAME", help="only these; nothing is stored"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for a kernel to run (60)")


def run(options: argparse.Namespace, cases: str = CASES) -> tuple[Result, list[str], bool]:
    """Return the verdicts, the lines to print, and whether all kernels that ran are right."""
    card = ask("jfp8.command_line.check:this_card", cases, starting=120)
    if card.failure:
        text = f"JAX does not start: {card.failure}. Run `python -m jfp8 doctor`."
        return {"failure": text}, [text], False
    found = card.result
    names = _chosen(found.pop("kernels"), options.kernels)
    with tempfile.TemporaryDirectory() as empty:  # without verdicts, which they would obey
        kernels = {n: _verdict(n, task, cases, options.seconds, empty) for n, task in names}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {**found, "versions": versions(), "date": now, "kernels": kernels}
    failed = [name for name, kernel in kernels.items() if kernel["failure"]]
    trouble = None if options.kernels or not kernels else _store(result)
    is_right = bool(kernels) and not failed and not trouble
    return {**result, "not_stored": trouble}, list(lines(result, failed, trouble)), is_right


def _chosen(known: list[list[str]], wanted: list[str] | None) -> list[list[str]]:
    names = [name for name, _ in known]
    if unknown := [name for name in wanted or () if name not in names]:
        raise SystemExit(
            f"This card has no kernel {', '.join(unknown)}; it has {', '.join(names)}."
        )
    return [pair for pair in known if wanted is None or pair[0] in wanted]


def _verdict(name: str, task: str, cases: str, seconds: float, cache: str) -> Result:
    argument = {"cases": cases, "kernel": name}
    environment = {"XDG_CACHE_HOME": cache}
    answer = ask(
        "jfp8.command_line.check:checked", argument, running=seconds, environment=environment
    )
    return {
        "task": task,
        "failure": answer.failure,
        "kind": answer.kind,
        "seconds": answer.seconds,
        **(answer.result or {}),
    }


def _store(result: Result) -> str | None:
    """Write the verdicts to the file that planners read; returns why not, if that fails."""
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


def _table(cases: str) -> Any:
    module, name = cases.split(":")
    return getattr(importlib.import_module(module), name)


def this_card(cases: str) -> Result:
    """Return the first device, and the kernels that it has: on a CPU those that it rehearses."""
    table, device = _table(cases), jax.devices()[0]
    is_gpu = device.platform == "gpu"
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if is_gpu else None
    found = [case for case in table if case.is_for(capability)]
    return {
        "card": device.device_kind,
        "interpreted": not is_gpu,
        "kernels": [[case.kernel, case.task] for case in found],
    }


def checked(argument: Result) -> Result:
    """Check one kernel, interpreted on a CPU; raises if it is wrong."""
    (case,) = (c for c in _table(argument["cases"]) if c.kernel == argument["kernel"])
    with rehearsed():
        measured = case.check(*case.arguments)
    return {"measured": measured}


def lines(result: Result, failed: list[str], trouble: str | None) -> Iterator[str]:
    """Yield the lines to print."""
    how = ", where kernels are interpreted" if result["interpreted"] else ""
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    yield from [f"{result['card']}{how}; {versions}", ""]
    table = [("kernel", "for", "seconds", "verdict")]
    for name, kernel in result["kernels"].items():
        verdict = f"WRONG ({kernel['kind']}): {kernel['failure']}" if kernel["failure"] else "right"
        table.append((name, kernel["task"], f"{kernel['seconds']:.1f}", verdict[:200]))
    yield from [*table_lines(table), ""]
    if not result["kernels"]:
        yield "Nothing was checked: `python -m jfp8 doctor` says what is missing."
    elif failed:
        tasks = dict.fromkeys(result["kernels"][name]["task"] for name in failed)
        yield f"{len(failed)} of {len(result['kernels'])} kernels failed: {', '.join(failed)}."
        if not trouble:
            yield f"jfp8 leaves out its kernels for {', '.join(tasks)} on this card."
    else:
        yield f"All {len(result['kernels'])} kernels are right."
    if trouble:
        yield trouble
    elif result["kernels"]:
        yield f"Verdicts: {verdict_file(result['card'])}"
