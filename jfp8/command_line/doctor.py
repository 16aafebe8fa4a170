"""``python -m jfp8 doctor``: show installed versions, the GPUs and their backends."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jfp8 import recipes
from jfp8.command_line.child import ask
from jfp8.conversion.report import report
from jfp8.conversion.tables import table_lines
from jfp8.kernels.verdicts import verdict_file, verdicts, versions
from jfp8.layers.linen.layers import Dense
from jfp8.tracing.compat import cudnn_version

Facts = dict[str, Any]

PACKAGES = r"jfp8|jax|jaxlib|flax|optax|ml[-_]dtypes|jax-cuda\d+-(plugin|pjrt)"
BY = {
    "xla": "FP8, cuBLASLt",
    "mosaic_gpu": "FP8, Pallas kernel of jfp8",
    "cudnn": "FP8, cuDNN block-scaled",
    "bf16": "bf16 tensor cores",
}
BAD_PTXAS = (12, 8, 0), (12, 9, 86)  # CUDA 12.8.0 to 12.9.0: the second is that of 12.9.1
KERNELS_SINCE = (0, 11, 2)
N = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--card", help='a card that is not here, such as "NVIDIA H200"')


def run(options: argparse.Namespace) -> tuple[Facts, list[str], bool]:
    """Return all facts, the lines to print, and whether nothing is wrong."""
    facts = gather(options.card)
    return facts, list(lines(facts)), not any(said["wrong"] for said in facts["advice"])


def gather(card: str | None, seconds: float = 120.0) -> Facts:
    """Collect what is installed, and ask JAX for its devices in a process that may hang."""
    answer = ask("jfp8.command_line.doctor:asked", card, starting=seconds)
    facts: Facts = {
        "python": platform.python_version(),
        "packages": installed(),
        "ptxas": ptxas(),
        "driver": driver(),
        "platforms": os.environ.get("JAX_PLATFORMS", ""),
        "jax": answer.result or {"failure": answer.failure},
    }
    return {**facts, "advice": [{"wrong": w, "text": t} for w, t in advice(facts)]}


def installed() -> dict[str, str]:
    """Return the versions of jfp8, of what it needs, and of JAX's plugins for CUDA."""
    found = {d.name: d.version for d in metadata.distributions()}
    kept = {name: v for name, v in found.items() if re.fullmatch(PACKAGES, name)}
    return dict(sorted({**kept, **{k: v for k, v in versions().items() if k == "jfp8"}}.items()))


def ptxas() -> dict[str, str] | None:
    """Return path and version of the assembler that XLA and Pallas call; None without one."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [p for folder in folders for p in Path(folder).glob("c*/bin/ptxas")]
    path = str(found[0]) if found else shutil.which("ptxas")
    said = path and _output(path, "--version")
    version = re.search(r"V(\d+\.\d+\.\d+)", said or "")
    return {"path": path, "version": version[1]} if path and version else None


def driver() -> list[dict[str, str]]:
    """Return what ``nvidia-smi`` says of each card; empty without it."""
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    said = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in (said or "").splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# In a separate process.


def asked(card: str | None) -> Facts:
    """Return JAX's devices, and what computes each recipe on the first GPU, or on `card`."""
    devices = [
        {
            "kind": d.device_kind,
            "platform": d.platform,
            "capability": str(getattr(d, "compute_capability", "")),
            "cores": getattr(d, "core_count", None),
        }
        for d in jax.devices()
    ]
    gpus = [d for d in devices if d["platform"] == "gpu"]
    card = card or next((d["kind"] for d in gpus), None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checked = {} if card is None else verdicts(card)
    cores = next((d["cores"] for d in gpus if d["kind"] == card), None) or 132
    return {
        "devices": devices,
        "cudnn": cudnn_version() if gpus else None,
        "card": card,
        "verdicts": checked,
        "unreadable": [str(warning.message) for warning in said],
        "recipes": [] if card is None else [backend_of(r(), card, cores) for r in recipes.RECIPES],
    }


def described(card: str, cores: int = 132) -> AbstractContextManager[object]:
    """Return a context in which JAX traces for a `card` that need not be here."""
    device = AbstractDevice(device_kind=card, num_cores=cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def backend_of(recipe: Any, card: str, cores: int = 132) -> dict[str, str]:
    """Return what a `card` multiplies N x N matrices by in a layer, and why nothing faster does."""
    model, x = Dense(N, recipe=recipe, use_bias=False), jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with described(card, cores):
        rows = report(model, variables, x).rows
    backend, _, reason = rows[0].cuda.partition(": ")
    if not rows[0].fp8:
        backend, reason = "bf16", rows[0].reason
    return {"recipe": recipe.name, "backend": backend, "reason": reason}


# What follows from the facts.


def advice(facts: Facts) -> Iterator[tuple[bool, str]]:
    """Yield what to do, and whether something is wrong until it is done."""
    yield from _about_jax(facts)
    yield from _about_ptxas(facts["ptxas"])
    yield from _about_verdicts(facts["jax"])


def _about_jax(facts: Facts) -> Iterator[tuple[bool, str]]:
    gpus, version = _gpus(facts["jax"]), facts["packages"]["jax"]
    if "failure" in facts["jax"]:
        yield True, f"JAX does not start: {facts['jax']['failure']}"
    elif facts["driver"] and not gpus:
        yield True, _why_no_gpu(facts)
    elif not gpus:
        yield False, "There is no GPU here: FP8 is emulated, slower than float32, same numbers."
    if _numbers(version)[:3] < KERNELS_SINCE:
        text = (
            f"Python {facts['python']} has JAX {version}, and with it none of jfp8's Pallas "
            "kernels, which compute rows and blocks of scales, grouped matmuls and attention in "
            "FP8. Install Python 3.12 or later, and there pip install 'jfp8[cuda]'."
        )
        yield bool(gpus or facts["jax"].get("card")), text


def _about_ptxas(found: dict[str, str] | None) -> Iterator[tuple[bool, str]]:
    if found and BAD_PTXAS[0] <= _numbers(found["version"]) < BAD_PTXAS[1]:
        text = (
            f"ptxas {found['version']} ({found['path']}) miscompiles causal masks, as all of CUDA "
            "12.8.0 to 12.9.0 do. Install a later one: pip install -U "
            "'nvidia-cuda-nvcc-cu12>=12.9.86', or pip install 'jfp8[cuda]' for CUDA 13."
        )
        yield True, text


def _about_verdicts(asked: Facts) -> Iterator[tuple[bool, str]]:
    yield from ((True, text) for text in asked.get("unreadable", ()))
    card, verdicts = asked.get("card") or "", asked.get("verdicts", {})
    failed = [name for name, kernel in verdicts.items() if kernel["failure"]]
    if failed:
        text = (
            f"Left out on {card}, because they failed `python -m jfp8 check`: "
            f"{', '.join(failed)}. The verdicts are in {verdict_file(card)}."
        )
        yield True, text
    elif _gpus(asked) and not verdicts:
        yield False, f"Nothing was checked on {card} yet: python -m jfp8 check"


def _gpus(asked: Facts) -> list[Facts]:
    return [device for device in asked.get("devices", ()) if device["platform"] == "gpu"]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _why_no_gpu(facts: Facts) -> str:
    cards = ", ".join(card["name"] for card in facts["driver"])
    if "cpu" in facts["platforms"]:
        return f"JAX_PLATFORMS={facts['platforms']} hides {cards}. Unset it."
    number = _numbers(facts["driver"][0]["driver_version"])[0]
    if number < 580:
        fix = f"driver {number} is too old for CUDA 13 (580): pip install 'jax[cuda12]'"
    else:
        fix = "pip install 'jfp8[cuda]'"
    return f"The driver shows {cards}, but JAX finds no GPU: {fix}."


def lines(facts: Facts) -> Iterator[str]:
    """Yield the lines to print."""
    asked, assembler = facts["jax"], facts["ptxas"]
    yield f"Python   {facts['python']}"
    yield "packages " + ", ".join(f"{name} {v}" for name, v in facts["packages"].items())
    yield "ptxas    " + (f"{assembler['version']}, {assembler['path']}" if assembler else "none")
    for card in facts["driver"] or [{"none": "nvidia-smi is not here, or shows no card"}]:
        yield "driver   " + ", ".join(card.values())
    for kind in sorted({d["kind"] for d in asked.get("devices", ())}):
        count = sum(d["kind"] == kind for d in asked["devices"])
        yield f"JAX      {count} x {kind}"
    if asked.get("recipes"):
        yield from ["", f"A layer of {N} x {N} x {N} on {asked['card']}:", ""]
        yield from _recipe_lines(asked["recipes"])
    yield ""
    for said in facts["advice"]:
        head = "WRONG: " if said["wrong"] else "Note: "
        yield from textwrap.wrap(head + said["text"], 100, break_long_words=False)


def _recipe_lines(rows: list[dict[str, str]]) -> Iterator[str]:
    table = [("recipe", "computed by")]
    table += [(row["recipe"], BY.get(row["backend"], row["backend"])) for row in rows]
    yield from table_lines(table)
    reasons: dict[str, list[str]] = {}
    for row in filter(lambda row: row["reason"], rows):
        reasons.setdefault(row["reason"], []).append(row["recipe"])
    if reasons:
        yield from ["", "Why nothing faster:"]
    for reason, names in reasons.items():
        text = f"{', '.join(names)}: {reason}"
        yield from textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")
