"""The GPU benchmark runs without a GPU: tiny, with kernels interpreted; and nothing stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need JAX 0.11.2 or later", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = [
    "checks",
    "ceilings",
    "products",
    "linear",
    "quantize",
    "block",
    "accumulation",
    "memory",
    "facts",
]
# One virtual device, as on the machines that this is for, and no complaints about ranks.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")},
    "PYTHONPATH": str(ROOT),
}


def run(script, *arguments, check=True):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The result of a smoke test, what it printed, and the folder of its programs."""
    folder = tmp_path_factory.mktemp("gpu")
    printed = run(
        "gpu.py", "--smoke", "--json", folder / "out.json", "--hlo", folder / "hlo", check=False
    )
    return json.loads((folder / "out.json").read_text()), printed, folder / "hlo"


@pytest.mark.slow
def test_every_section_runs(smoke):
    result, _, _ = smoke
    assert list(result["sections"]) == SECTIONS
    for section in SECTIONS:
        assert any(r["section"] == section for r in result["records"])
        assert result["sections"][section]["seconds"] > 0
    failures = [
        (r["section"], r["group"], r["name"], r.get("error", r.get("skipped")))
        for r in result["records"]
        if "error" in r or "skipped" in r
    ]
    assert failures == []


def test_the_result_has_what_its_readers_need(smoke):
    result, _, _ = smoke
    assert set(result) == {
        "benchmark",
        "smoke",
        "date",
        "device",
        "versions",
        "settings",
        "clocks",
        "ceilings",
        "targets",
        "sections",
        "records",
    }
    timed = [r for r in result["records"] if "ms" in r]
    assert {r["section"] for r in timed} == {"ceilings", "products", "linear", "quantize", "block"}
    for record in timed:
        assert record["ms"] > 0
        assert record["prepare_s"] > 0
        assert {"calls", "baseline", "ratio", "tflops", "gbs", "floor_ms"} <= set(record)
        assert {"percent_of_floor", "percent_of_best", "program"} <= set(record)
        assert {"flops_f8", "flops_bf16", "bytes"} & set(record)
    kernels = {name for r in timed for name in r["uses"]}
    assert {"matmul", "block_matmul", "quantize_both", "quantize_rows_in_blocks"} <= kernels


def test_no_figure_claims_to_be_of_a_gpu(smoke):
    result, printed, _ = smoke
    assert result["smoke"] is True
    assert result["device"]["platform"] == "cpu"
    assert result["device"]["driver"] is None
    assert result["clocks"] == []
    assert result["targets"] == []
    assert set(result["ceilings"].values()) == {None}
    for record in result["records"]:
        for rate in ("ratio", "tflops", "gbs", "floor_ms", "percent_of_floor", "percent_of_best"):
            assert record.get(rate) is None
    for text in (json.dumps(result), printed):
        assert "NVIDIA" not in text
        assert "H200" not in text
    assert "TFLOP" not in printed
    assert printed.rstrip().endswith("interpreted on a CPU, whose times mean nothing.")


def test_programs_of_layers_are_written(smoke):
    _, _, programs = smoke
    names = [path.name for path in programs.iterdir()]
    assert any(name.startswith("linear-") and "delayed" in name for name in names)
    assert any(name.startswith("block-") for name in names)
    assert all("HloModule" in path.read_text() for path in programs.iterdir())


# The harness, on cases that do what kernels on their first run do.

CASES = """
import os, time
from on_gpu.harness import Case, Group, Timed, running

def good():
    running()
    return Timed(lambda: None, 1)

def hangs():
    running()
    time.sleep(1000)

def dies():
    os._exit(9)

def raises():
    raise ValueError("no such tile")

def first(settings):
    cases = [
        Case("good", good),
        Case("hangs", hangs, ("slow_kernel",)),
        Case("raises", raises),
        Case("needs it too", good, ("slow_kernel",)),
        Case("dies", dies),
        Case("checked", lambda: {"fine": True}),
    ]
    yield Group("group", cases, "good")

def second(settings):
    yield Group("other", [Case("good", good)])
    raise RuntimeError("the section fails")

def third(settings):
    yield Group("long", [Case("sleeps", lambda: time.sleep(1000)), Case("never", good)])
"""
DRIVER = """
import json, pathlib, sys
sys.path[:0] = [{folder!r}, {benchmarks!r}]
from on_gpu.harness import Settings, supervise
import os
os.environ["PYTHONPATH"] = {folder!r} + os.pathsep + os.environ["PYTHONPATH"]
records = []
for sections, minutes in ((("first", "second"), 4), (("third",), 0.1)):
    records += supervise(
        {{name: ("cases:" + name, 1.0) for name in sections}},
        Settings(repeats=3, warmups=1, compiling=60, running=2),
        minutes=minutes,
    ).records
pathlib.Path({folder!r}, "out.json").write_text(json.dumps(records))
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "cases.py").write_text(textwrap.dedent(CASES))
    driver = DRIVER.format(folder=str(folder), benchmarks=str(ROOT / "benchmarks"))
    subprocess.run([sys.executable, "-c", driver], env=ENVIRONMENT, timeout=300, check=True)
    found = json.loads((folder / "out.json").read_text())
    by_name = {(r["section"], r["name"]): r for r in found}
    assert len(by_name) == len(found)
    return by_name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name", "key", "said"),
    [
        ("first", "hangs", "error", "no answer within 2 s"),
        ("first", "raises", "error", "ValueError: no such tile"),
        ("first", "needs it too", "skipped", "slow_kernel hung"),
        ("first", "dies", "error", "exit code 9"),
        ("first", "checked", "fine", True),
        ("second", "", "error", "the section fails"),
        ("third", "sleeps", "skipped", "no time"),
    ],
)
def test_a_failure_is_a_line_of_its_own(records, section, name, key, said):
    found = records[section, name][key]
    assert found is said or said in found


@pytest.mark.parametrize("section", ["first", "second"])
def test_others_are_timed_all_the_same(records, section):
    assert records[section, "good"]["ms"] >= 0
    assert "error" not in records[section, "good"]


def test_the_clock_is_kept(records):
    assert ("third", "never") not in records


# What is derived from times.


def derive(records, on_gpu=True):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import on_gpu.tables
    finally:
        sys.path.pop(0)
    for r in records:
        r.setdefault("uses", [])
        r.setdefault("baseline", "bf16")
    limits = on_gpu.tables.derive(records, on_gpu)
    return limits, on_gpu.tables.targets(records)


def product(name, ms, **facts):
    flops = 2 * 8192**3
    return {"section": "products", "group": "8192x8192x8192", "name": name, "ms": ms, **facts} | (
        {"flops_bf16": flops} if name == "bf16" else {"flops_f8": flops}
    )


def test_rates_and_floors():
    copied = {"section": "ceilings", "group": "copy", "name": "copy", "ms": 1.0, "bytes": 4e9}
    f8 = {"program": {"kernels": {"cublasLt f8": 1.0}}}
    linear = {"section": "linear", "group": "8192x8192x8192", "flops_f8": 6 * 8192**3}
    rows = [
        copied,
        product("bf16", 1.6),
        product("jfp8 xla fast", 0.8, **f8),
        product("jfp8 mosaic_gpu fast", 1.0),
        {**linear, "name": "bf16", "ms": 4.8, "flops_f8": 0, "flops_bf16": 6 * 8192**3},
        {**linear, "name": "delayed", "ms": 3.0, "bytes": 8e8},
    ]
    limits, targets = derive(rows)
    assert limits["copy_gbs"] == pytest.approx(4000)
    assert limits["fp8_tflops"] == pytest.approx(2 * 8192**3 / 0.8e-3 / 1e12)
    assert rows[3]["percent_of_best"] == pytest.approx(80)
    assert rows[3]["ratio"] == pytest.approx(1.6)
    # Three products at the best rate seen, and 0.8 GB at that of a copy, one after the other.
    assert rows[5]["floor_ms"] == pytest.approx(3 * 0.8 + 0.2)
    assert rows[5]["percent_of_floor"] == pytest.approx(100 * 2.6 / 3)
    verdicts = {t["what"]: t for t in targets}
    assert verdicts["FP8 product, 8192x8192x8192"]["measured"] == pytest.approx(100)
    assert verdicts["linear delayed, 8192x8192x8192"]["measured"] == pytest.approx(1.6)
    assert verdicts["linear delayed, 8192x8192x8192"]["met"] is False
    assert verdicts["linear block, 8192x8192x8192"]["met"] is None


def test_a_wrong_kernel_is_marked_wherever_it_is_timed():
    failed = {"section": "checks", "group": "g", "name": "matmul: running sum", "error": "off"}
    rows = [failed, product("jfp8 mosaic_gpu fast", 1.0, uses=["matmul"]), product("bf16", 1.6)]
    derive(rows)
    assert rows[1]["kernel_failed_its_check"] is True
    assert rows[2]["kernel_failed_its_check"] is False


# Tuning.


@pytest.mark.slow
def test_tuning_writes_the_best_and_keeps_the_rest(tmp_path):
    table = tmp_path / "tuned.json"
    kept = {"NVIDIA H100": {"running": {"8192x8192x8192": {"ms": 1.0}}}}
    table.write_text(json.dumps(kept))
    run("tune_gpu.py", "--smoke", "--kernels", "running", "quantize_both", "--table", table)
    written = json.loads(table.read_text())
    assert written["NVIDIA H100"] == kept["NVIDIA H100"]
    (device,) = set(written) - set(kept)
    assert device == "cpu"
    assert set(written["cpu"]) == {"running", "quantize_both"}
    line = written["cpu"]["running"]["128x128x128"]
    assert line["ms"] > 0
    assert line["of"] == "128x128x128"
    assert {"tile_m", "tile_n", "stages"} <= set(line["tiles"])
