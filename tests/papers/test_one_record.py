"""Facts on the pages are the code's and the records': defaults, limits, figures, names, options."""

import inspect
import json
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from packaging.requirements import Requirement

import jfp8
from jfp8.command_line.doctor import KERNELS_SINCE
from jfp8.command_line.parser import COMMANDS
from jfp8.debug import faults
from jfp8.matmul.planner import NAMED
from jfp8.optim.adam import PRESETS
from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "docs", "docs/api", "docs/coming_from", "docs/trainers")
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md"))
    if path.name != "CHANGELOG.md"
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def default(function: object, name: str) -> object:
    return inspect.signature(function).parameters[name].default


def bytes_per_parameter(tx: optax.GradientTransformation) -> str:
    shapes = jax.eval_shape(tx.init, {"kernel": jnp.zeros((4096, 4096))})
    stored = [leaf for leaf in jax.tree.leaves(shapes) if leaf.ndim]
    return f"{sum(leaf.size * leaf.dtype.itemsize for leaf in stored) / 4096**2:.2f}"


def floor(package: str) -> str:
    found = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    (specifier,) = found[package].specifier
    return specifier.version


# Pattern with one group -> the value in the code. Each occurrence must have it, and one must exist.
FACTS = {
    r"(?:stores|last) (\d\d) (?:amaxes|steps)\b": lambda: str(
        jfp8.recipes.get("delayed").init_state()["lhs"]["amax_history"].size
    ),
    r"doubles after (\d+) finite": lambda: str(default(jfp8.loss_scale, "growth_interval")),
    r"JAX (0\.(?!10)\d+[\d.]*) or later": lambda: ".".join(map(str, KERNELS_SINCE)),
    r"JAX ([\d.]+\d), Flax [\d.]+\d": lambda: floor("jax"),
    r"JAX [\d.]+\d, Flax ([\d.]+\d)": lambda: floor("flax"),
    r"Flax [\d.]+\d(?:,| and) Optax ([\d.]+\d)": lambda: floor("optax"),
    r"Python (3\.\d+) or later, (?:JAX|from a clone)": lambda: PROJECT["requires-python"][2:],
    r"([\d.]+) bytes per parameter instead of 8": lambda: bytes_per_parameter(
        jfp8.optim.adamw(1e-3)
    ),
    r"momentum in ([\d.]+) instead of 4": lambda: bytes_per_parameter(jfp8.optim.muon(0.02)),
}


@pytest.mark.parametrize("pattern", FACTS)
def test_numbers_on_pages_are_in_the_code(pattern):
    found = {name: re.findall(pattern, text) for name, text in TEXTS.items()}
    value = FACTS[pattern]()
    assert any(found.values())
    assert {name: got for name, got in found.items() if set(got) - {value}} == {}, value


PARITY = ROOT / "benchmarks/results/parity.json"


def gaps(script) -> list[str]:
    """Rows of recipes: the number of seeds, mean gap and interval of the language model's loss."""
    rows = script.table({"lm": script.read(PARITY)["lm"]}).splitlines()
    return [re.sub(r"^(\| .* \| \d+ \| .*?\]).*", r"\1", row) for row in rows if "**" in row]


def table_of_runs(script) -> list[str]:
    return [script.table(json.loads(script.RESULTS.read_text())["runs"])]


def errors_of_attention(script) -> list[str]:
    """Errors of O with outlier values, with a scale per token and with one per tensor."""
    errors = json.loads(script.RESULTS.read_text())["errors"]
    rows = script.table(errors, 4096, 128, causal=True).splitlines()
    error = {row.split(" | ")[0].strip("| "): row.split(" | ")[5] for row in rows}
    return [f"{error['tokens']} % instead of {error['per tensor']} %"]


def gaps_of_exports(script) -> list[str]:
    """Mean gaps in percent: rounded after training and quantization-aware, in both formats."""
    (table,) = table_of_runs(script)
    found = re.findall(r"^\| \w+, [\w -]+ \| \+([\d.]+) \|", table, re.MULTILINE)
    mx, mx_aware, nv, nv_aware = (f"{float(gap):.2f} %" for gap in found)
    return [
        f"loses {mx} when it is rounded to MXFP4, and {nv} in NVFP4",
        f"it loses {mx_aware} and {nv_aware}",
    ]


def mismatch_of_rounding(script) -> list[str]:
    (rows,) = table_of_runs(script)
    (row,) = (row for row in rows.splitlines() if row.startswith("| rounded for the sampler |"))
    return [f"largest mismatch was {float(row.split(' | ')[-1].strip('| ')):g} nats"]


def gaps_of_clients(script) -> list[str]:
    rows = script.table(json.loads(script.RESULTS.read_text()))[2:]
    assert all(re.search(r"\| (\d+) of \1 \|", row) for row in rows)
    means = [float(gap) for row in rows for gap in re.findall(r"([-+][\d.]+) \[", row)]
    lie = f"mean losses lay within {max(map(abs, means)):.1f} % of float32"
    return [f"{len(rows)} small models of these libraries", lie]


# Script in benchmarks -> page, and what a record says there.
RECORDS = {
    "parity": ("docs/results.md", gaps),
    "exported_lm": ("docs/benchmarks.md", gaps_of_exports),
    "rl_mismatch": ("docs/benchmarks.md", mismatch_of_rounding),
    "attention_accuracy": ("docs/benchmarks.md", errors_of_attention),
    "gain_table": ("docs/benchmarks.md", lambda script: ["\n".join(script.gains())]),
    "clients.table": ("docs/benchmarks.md", gaps_of_clients),
}


@pytest.mark.parametrize("name", RECORDS)
def test_tables_on_pages_are_the_records(name):
    page, found_in = RECORDS[name]
    found = found_in(imported(name, "benchmarks"))
    assert found
    page = " ".join(TEXTS[page].split())
    assert [text for text in found if " ".join(text.split()) not in page] == []


def test_the_page_has_the_gains_of_whole_steps():
    programs = json.loads((ROOT / "benchmarks/results/whole_steps.json").read_text())["programs"]
    names = ("one GPU", "8 GPUs, FSDP", "8 GPUs, FSDP×TP 2×4", "width 512")
    gains = (programs[name]["bf16"]["ms"] / programs[name]["delayed"]["ms"] for name in names)
    text = (
        TEXTS["docs/benchmarks.md"].partition("## Whole training steps")[2].partition("`python")[0]
    )
    assert re.findall(r"\b[01]\.\d\d\b", text) == [f"{gain:.2f}" for gain in gains]


def test_the_picture_of_the_readme_is_described_by_the_record():
    record = json.loads(PARITY.read_text())["lm"]["gaps"]
    (text,) = re.findall(r"!\[(Mean gap .*?)\]", TEXTS["README.md"])
    assert f"NVFP4 ends {record['nvfp4']['loss_percent']['mean']:.2f} percent higher" in text
    assert f"over {record['nvfp4']['loss_percent']['n']} seeds" in text


# Pattern with one group, a name -> the names that exist.
NAMES = {
    r"python -m jfp8 ([a-z][a-z-]*)": lambda: set(COMMANDS),
    r'implementation="(\w+)"': lambda: {*NAMED, "cudnn", "chunked_xla"},  # tokamax
    r'preset="(\w+)"': lambda: set(PRESETS),
    r"(?:jfp8|\.)\[(\w+)\]'?`? ": lambda: set(PROJECT["optional-dependencies"]),
    r"\.ci/full (\w+)": lambda: set(
        subprocess.check_output(["bash", ROOT / ".ci/full", "--list"], text=True).split()
    ),
    # "mxfp" is the misspelled one of the table of errors.
    r'recipe="(\w+)"': lambda: {"mxfp", *(recipe.name for recipe in jfp8.recipes.RECIPES)},
    r"`(?:jfp8\.recipes\.)?(\w+(?:Scaling|E5M2|Toolkit))\(\)`": lambda: {
        recipe.__name__ for recipe in jfp8.recipes.RECIPES
    },
}


@pytest.mark.parametrize("pattern", NAMES)
def test_names_on_pages_exist(pattern):
    found = {name for text in TEXTS.values() for name in re.findall(pattern, text)}
    assert found
    assert found <= NAMES[pattern]()


def test_the_table_of_faults_has_the_names_of_the_code():
    page = TEXTS["docs/debugging.md"]
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE)))
    )
    ours = {name for name in named if "_in_fp8" in name or name.endswith(("_history", "_gradient"))}
    assert {"non_finite", "dead", "outliers", "noise", "no_scale"} <= named
    assert ours <= set(faults.NAMES)
    assert set(faults.NAMES) <= named


def test_options_on_pages_exist():
    """Each ``--option`` of an example or benchmark, in its file or in one that it imports."""
    sources = {
        folder: "".join(p.read_text() for p in (ROOT / folder).rglob("*.py"))
        for folder in ("examples", "benchmarks")
    }
    used = {
        (folder, option)
        for text in TEXTS.values()
        for folder, _, rest in re.findall(r"python (examples|benchmarks)/(\w+)\.py([^`\n]*)", text)
        for option in re.findall(r"--[a-z][\w-]*", rest)
    }
    assert len(used) > 10
    assert [pair for pair in used if f'"{pair[1]}"' not in sources[pair[0]]] == []
