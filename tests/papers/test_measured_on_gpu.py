"""The pages state measured times as the record has them, which benchmarks/gpu.py summarizes."""

import json
import re
from pathlib import Path

import pytest

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
gpu_tables = imported("gpu_tables", "benchmarks")
records, summary, tables = (
    imported(f"on_gpu.{name}", "benchmarks") for name in ("records", "summary", "tables")
)
RECORD = json.loads(gpu_tables.RESULTS.read_text(encoding="utf-8"))
BY_HAND = RECORD["by_hand"]
CUBE, LARGER = "8192x8192x8192", "15872x4096x16384"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


SHOWN = (gpu_tables.linear, gpu_tables.block, gpu_tables.experts)


@pytest.mark.parametrize("table", gpu_tables.TABLES, ids=lambda table: table.__name__)
def test_tables_on_the_page_are_the_record(table):
    text = table(RECORD)
    assert len(re.findall(r"\d\.\d\d|\d %", text)) > 2
    assert (text in page("docs/benchmarks.md")) == (table in SHOWN)


def ratios(section: str, groups: list[str], name: str) -> str:
    """Least and largest speed relative to the baseline, in all runs."""
    found = [r["ratio"] for group in groups for r in gpu_tables.found(RECORD, section, group, name)]
    least, most = (f"{f(found):.2f}" for f in (min, max))
    return least if least == most else f"{least} to {most}"


def program(ending: str) -> dict:
    """The first program of a profile with this name: those alone on the GPU come first."""
    return next(p for p in BY_HAND["kernels"]["programs"] if p["program"].endswith(ending))


def share(ending: str, word: str) -> str:
    found = program(ending)
    return f"{100 * sum(t for k, t in found['us'].items() if word in k) / found['busy_us']:.0f}"


def best_share_of_cublaslt() -> str:
    lines = RECORD["runs"]["before-clusters"]["records"]
    best = {}
    for r in lines:
        if r["section"] == "products" and re.match("jfp8 .* fast$", r["name"]):
            best[r["group"]] = max(best.get(r["group"], 0), r["percent_of_best"])
    assert len(best) == 3
    return f"{min(best.values()):.0f}"


def shares_of_a_copy() -> str:
    """Least and largest rate of the kernels that quantize, as a share of a copy's."""
    rows = gpu_tables.quantizing(RECORD).splitlines()[2:]
    ours = [row for row in rows if not row.startswith(("| amax", "| XLA"))]
    percent = [int(n) for row in ours for n in re.findall(r"(\d+) %", row)]
    return f"{min(percent)} to {max(percent)}"


def clocks() -> str:
    found = [r["sm_mhz"] for run in RECORD["runs"].values() for r in run["records"]]
    return f"{min(found):,.0f} to {max(found):,.0f}"


def experts() -> dict:
    (found,) = gpu_tables.found(RECORD, "experts", "16384x4096x4096, 8 equal", "delayed")
    return found


ATTENTION = [
    f"{s}, forward, backward" for s in ("2x8192, 16x128", "8x2048, 16x128", "2x8192, 16x64")
]
# Page, pattern with one group -> the value in the record. It is there at least once, and right.
FACTS = {
    ("README.md", r"larger train \[([\d.]+ to [\d.]+) times"): lambda: ratios(
        "linear", [CUBE, LARGER], "delayed"
    ),
    ("README.md", r"block of a 7B model trains ([\d.]+) times"): lambda: ratios(
        "block", [gpu_tables.BLOCK], "delayed"
    ),
    ("docs/gpus.md", r"8192³ trains ([\d.]+ to [\d.]+) times"): lambda: ratios(
        "linear", [CUBE], "delayed"
    ),
    ("docs/gpus.md", r"7B model trains \[([\d.]+) times"): lambda: ratios(
        "block", [gpu_tables.BLOCK], "delayed"
    ),
    ("docs/gpus.md", r"1024³ trains at ([\d.]+) times"): lambda: ratios(
        "linear", ["1024x1024x1024"], "delayed"
    ),
    ("docs/benchmarks.md", r"clocks \| ([\d,]+ to [\d,]+) MHz"): clocks,
    ("docs/benchmarks.md", r"reach at least (\d+) % of cuBLASLt"): best_share_of_cublaslt,
    ("docs/benchmarks.md", r"kernels quantize at (\d+ to \d+) % of a copy"): shares_of_a_copy,
    ("docs/benchmarks.md", r"FP8 is ([\d.]+) times as fast as the former"): lambda: (
        f"{experts()['ratio']:.1f}"
    ),
    ("docs/benchmarks.md", r"run ([\d.]+ to [\d.]+) times as fast as\s+in"): lambda: ratios(
        "linear", [CUBE, LARGER], "block"
    ),
    ("docs/benchmarks.md", r"FP8 matmuls take (\d+) %"): lambda: share("2048 | delayed", "nvjet"),
    ("docs/benchmarks.md", r"and quantization (\d+) %"): lambda: share(
        "2048 | delayed", "quantize"
    ),
    ("docs/attention.md", r"ran at ([\d.]+ to [\d.]+) times"): lambda: ratios(
        "attention", ATTENTION, "FP8"
    ),
}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact[0]} {fact[1]}")
def test_figures_on_pages_are_in_the_record(fact):
    name, pattern = fact
    found = re.findall(pattern, re.sub(r"\s+", " ", page(name)))
    assert set(found) == {FACTS[fact]()}


def test_conditions_on_the_page_are_the_record():
    run = RECORD["runs"]["before-clusters"]
    text, versions = page("docs/benchmarks.md"), run["versions"]
    assert f"{run['device']['kind']}, 700 W, driver {run['device']['driver']}" in text
    assert f"Flax {versions['flax']}, JAX {versions['jax']}, CUDA 13" in text
    assert f"medians of {run['settings']['repeats']} interleaved runs" in text
