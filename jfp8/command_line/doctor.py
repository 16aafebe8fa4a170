"""``python -m jfp8 doctor``: show what is installed, and the kernels that each recipe gets here.

Names the fix for missing packages, old drivers, hidden GPUs and faulty compilers.
"""

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
from collections import Counter
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
from jfp8.kernels.rates import RATES, name_of
from jfp8.kernels.verdicts import verdict_file, verdicts, versions
from jfp8.layers.linen.layers import Dense
from jfp8.tracing.compat import cudnn_version
from jfp8.tracing.devices import capability_of, unknown_card

Facts = dict[str, Any]
Advice = tuple[bool, str]  # whether something is wrong until it is done, and what to do

PACKAGES = r"jax|jaxlib|flax|optax|ml[-_]dtypes|jax-cuda\d+-(plugin|pjrt)"
BY = {
    "xla": "FP8, cuBLASLt",
    "mosaic_gpu": "FP8, Pallas kernel of jfp8",
    "cudnn": "FP8, cuDNN block-scaled",
    "bf16": "bf16 tensor cores",
}
BAD_PTXAS = (12, 8, 0), (12, 9, 86)  # CUDA 12.8.0 to 12.9.0: the second is that of 12.9.1
KERNELS_SINCE = (0, 11, 2)
N = 4096
ELSEWHERE = 'describe a card that this machine lacks, such as "NVIDIA H200"'


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--card", type=known, help=ELSEWHERE)


def known(card: str) -> str:
    """Return the name of a `card` that jfp8 knows; raise for others."""
    if name_of(card) is None and capability_of(card) is None:
        raise argparse.ArgumentTypeError(unknown_card(card, RATES))
    return card


def run(options: argparse.Namespace) -> tuple[Facts, list[str], bool]:
    """Return all facts, the lines to print, and whether nothing is wrong."""
    # In a process, because JAX may hang while it looks for devices.
    answer = ask("jfp8.command_line.doctor:asked", options.card, limit=120)
    facts: Facts = {
        "python": platform.python_version(),
        "packages": installed(),
        "ptxas": ptxas(),
        "driver": driver(),
        "platforms": os.environ.get("JAX_PLATFORMS", ""),
        "jax": answer["result"] or {"failure": answer["failure"]},
    }
    facts["advice"] = [{"wrong": wrong, "text": text} for wrong, text in advice(facts)]
    return facts, list(lines(facts)), not any(said["wrong"] for said in facts["advice"])


def installed() -> dict[str, str]:
    """Return the versions of jfp8, of what it needs, and of JAX's plugins for CUDA."""
    found = {d.name: d.version for d in metadata.distributions() if re.fullmatch(PACKAGES, d.name)}
    return dict(sorted({**found, "jfp8": versions()["jfp8"]}.items()))


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
    devices = jax.devices()
    gpus = [d for d in devices if d.platform == "gpu"]
    card = card or next((d.device_kind for d in gpus), "")
    with warnings.catch_warnings(record=True, action="always") as said:
        checked = verdicts(card) if card else {}
    cores = next((d.core_count for d in gpus if d.device_kind == card), None) or 132
    return {
        "devices": [d.device_kind for d in devices],
        "gpus": len(gpus),
        "cudnn": cudnn_version() if gpus else None,
        "card": card,
        "verdicts": checked,
        "unreadable": [str(warning.message) for warning in said],
        "recipes": [backend_of(r(), card, cores) for r in recipes.RECIPES] if card else [],
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


# Questions about the facts: is there something to do?


def _about_jax(facts: Facts) -> Advice | None:
    here, version = facts["jax"], facts["packages"]["jax"]
    if _numbers(version)[:3] >= KERNELS_SINCE:
        return None
    text = (
        f"Python {facts['python']} has JAX {version}, and with it none of jfp8's Pallas "
        "kernels, which compute rows and blocks of scales and grouped matmuls in "
        "FP8. Install Python 3.12 or later, and there pip install 'jfp8[cuda]'."
    )
    return bool(here.get("card")), text


def _about_ptxas(facts: Facts) -> Advice | None:
    found = facts["ptxas"]
    if not found or not BAD_PTXAS[0] <= _numbers(found["version"]) < BAD_PTXAS[1]:
        return None
    text = (
        f"ptxas {found['version']} ({found['path']}) miscompiles causal masks, as all of CUDA "
        "12.8.0 to 12.9.0 do. Install a later one: pip install -U "
        "'nvidia-cuda-nvcc-cu12>=12.9.86', or pip install 'jfp8[cuda]' for CUDA 13."
    )
    return True, text


def _about_devices(facts: Facts) -> Advice | None:
    here, cards = facts["jax"], ", ".join(card["name"] for card in facts["driver"])
    if "failure" in here:
        return True, f"JAX does not start: {here['failure']}"
    if here["gpus"]:
        return None
    if not cards:
        return False, "There is no GPU here: FP8 is emulated, slower than float32, same numbers."
    if "cpu" in facts["platforms"]:
        return True, f"JAX_PLATFORMS={facts['platforms']} hides {cards}. Unset it."
    number = _numbers(facts["driver"][0]["driver_version"])[0]
    fix = "pip install 'jfp8[cuda]'"
    if number < 580:
        fix = f"driver {number} is too old for CUDA 13 (580): pip install 'jax[cuda12]'"
    return True, f"The driver shows {cards}, but JAX finds no GPU: {fix}."


def _about_verdicts(facts: Facts) -> Advice | None:
    here = facts["jax"]
    card, checked = here.get("card", ""), here.get("verdicts", {})
    if unreadable := here.get("unreadable"):
        return True, " ".join(unreadable)
    if failed := [name for name, kernel in checked.items() if kernel["failure"]]:
        text = (
            f"Left out on {card}, because they failed `python -m jfp8 check`: "
            f"{', '.join(failed)}. The verdicts are in {verdict_file(card)}."
        )
        return True, text
    if here.get("gpus") and not checked:
        return False, f"Nothing was checked on {card} yet: python -m jfp8 check"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


QUESTIONS = (_about_jax, _about_ptxas, _about_devices, _about_verdicts)


def advice(facts: Facts) -> Iterator[Advice]:
    """Yield what to do, and whether something is wrong until it is done."""
    yield from filter(None, (question(facts) for question in QUESTIONS))


def lines(facts: Facts) -> Iterator[str]:
    """Yield the lines to print."""
    here, cards = facts["jax"], (", ".join(card.values()) for card in facts["driver"])
    answers = {
        "Python": facts["python"],
        "packages": ", ".join(f"{name} {v}" for name, v in facts["packages"].items()),
        "ptxas": ", ".join((facts["ptxas"] or {"": "none"}).values()),
        "driver": "; ".join(cards) or "nvidia-smi is not here, or shows no card",
        "JAX": ", ".join(f"{n} x {kind}" for kind, n in Counter(here.get("devices")).items()),
    }
    yield from (f"{name:<8} {answer}" for name, answer in answers.items())
    if rows := here.get("recipes"):
        yield from ["", f"A layer of {N} x {N} x {N} on {here['card']}:", ""]
        table = [(row["recipe"], BY.get(row["backend"], row["backend"])) for row in rows]
        yield from table_lines([("recipe", "computed by"), *table])
        for reason in dict.fromkeys(row["reason"] for row in rows if row["reason"]):
            names = ", ".join(row["recipe"] for row in rows if row["reason"] == reason)
            yield from ["", *textwrap.wrap(f"{names}: nothing faster, because of {reason}", 100)]
    yield ""
    for wrong, text in advice(facts):
        head = "WRONG: " if wrong else "Note: "
        yield from textwrap.wrap(head + text, 100, break_long_words=False)
