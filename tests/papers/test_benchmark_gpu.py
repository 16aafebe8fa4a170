"""The GPU benchmark runs without a GPU: tiny, with kernels interpreted; and nothing stops it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from support.scripts import imported, on_path

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need JAX 0.11.2 or later", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TIMED = ["ceilings", "products", "alone", "linear", "quantize"]
TIMED += ["block", "attention", "experts", "fusions"]
SECTIONS = ["checks", *TIMED, "accumulation", "facts"]
# One virtual device, as on the machines that this is for, and no complaints about ranks.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")},
    "PYTHONPATH": str(ROOT),
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "programs"),
}


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    return done.stdout


cases, device_time, harness, records_file, tables = (
    imported(f"on_gpu.{name}", "benchmarks")
    for name in ("cases", "device_time", "harness", "records", "tables")
)


@pytest.mark.slow
def test_every_section_runs_and_claims_nothing_of_a_gpu(tmp_path):
    file, programs = tmp_path / "out.jsonl", tmp_path / "hlo"
    printed = run("--smoke", "--records", file, "--hlo", programs)
    assert run("--table", file) in printed
    result = tables.complete(records_file.load(file))
    records = result["records"]
    assert list(result["sections"]) == SECTIONS
    assert {r["section"] for r in records} == set(SECTIONS)
    assert [r for r in records if "error" in r or "skipped" in r] == []
    timed = [r for r in records if "ms" in r]
    assert {r["section"] for r in timed} == set(TIMED)
    for record in timed:
        assert 0 < record["ms_p10"] <= record["ms"] <= record["ms_p90"]
        assert record["clock"] == "host"
        assert {"prepare_s", "calls", "baseline", "program"} <= set(record)
        assert {"flops_f8", "flops_bf16", "bytes"} & set(record)
    kernels = {name for r in timed for name in r["uses"]}
    assert {"matmul", "block_matmul", "quantize_tensor", "quantize_rows_in_blocks"} <= kernels
    # No figure claims to be of a GPU.
    assert result["smoke"] is True
    assert (result["device"]["platform"], result["device"]["driver"]) == ("cpu", None)
    assert result["targets"] == []
    assert set(result["ceilings"].values()) == {None}
    for record in records:
        assert not record.get("clocks")
        for rate in ("ratio", "tflops", "gbs", "floor_ms", "percent_of_floor", "percent_of_best"):
            assert record.get(rate) is None
    assert "TFLOP" not in printed
    assert printed.rstrip().endswith("interpreted on a CPU, whose times mean nothing.")
    names = [path.name for path in programs.iterdir()]
    assert {name.partition("-")[0] for name in names} >= {"linear", "block"}
    assert all("HloModule" in path.read_text() for path in programs.iterdir())


def derive(records):
    """With the time of the last bf16 before each as the one that was taken beside it."""
    beside = None
    for r in records:
        beside = r["ms"] if r["name"] == "bf16" else beside
        r.setdefault("uses", [])
        r.setdefault("baseline_ms", beside)
    return tables.derive(records, True), tables.targets(records)


def product(name, ms, **facts):
    flops = 2 * 8192**3
    return {"section": "products", "group": "8192x8192x8192", "name": name, "ms": ms, **facts} | (
        {"flops_bf16": flops} if name == "bf16" else {"flops_f8": flops}
    )


def test_a_wrong_kernel_is_marked_and_counts_for_nothing():
    failed = {"section": "checks", "group": "g", "name": "matmul: running sum", "error": "off"}
    rows = [failed, product("jfp8 mosaic_gpu fast", 1.0, uses=["matmul"]), product("bf16", 1.6)]
    limits, targets = derive(rows)
    assert rows[1]["kernel_failed_its_check"] is True
    assert rows[2]["kernel_failed_its_check"] is False
    assert limits["fp8_tflops"] is None
    assert all(t["measured"] is None for t in targets)


def test_device_times_are_those_of_the_kernels_of_a_run():
    """From a profile like that of CUPTI: two runs of two kernels with a gap, on two streams."""
    text = """
      planes {
        name: "/host:CPU"
        event_metadata { key: 1 value { id: 1 name: "timed run 0" } }
        event_metadata { key: 2 value { id: 2 name: "timed run 1" } }
        lines {
          name: "python"
          events { metadata_id: 1 offset_ps: 1000000 duration_ps: 8000000 }
          events { metadata_id: 2 offset_ps: 10000000 duration_ps: 8000000 }
        }
      }
      planes {
        name: "/device:GPU:0"
        event_metadata { key: 1 value { id: 1 name: "kernel" } }
        lines {
          name: "Stream #13(Compute)"
          events { metadata_id: 1 offset_ps: 2000000 duration_ps: 1000000 }
          events { metadata_id: 1 offset_ps: 4000000 duration_ps: 3000000 }
          events { metadata_id: 1 offset_ps: 11000000 duration_ps: 2000000 }
        }
        lines {
          name: "Stream #14(Compute)"
          events { metadata_id: 1 offset_ps: 12000000 duration_ps: 3000000 }
        }
        lines {
          name: "XLA Ops"
          events { metadata_id: 1 offset_ps: 1000000 duration_ps: 90000000 }
        }
      }
    """
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    found = {n: device_time.span(own) for n, own in device_time.kernels_of_runs(profile).items()}
    assert found == {0: (5000, 4000), 1: (4000, 4000)}


def test_a_program_alone_is_compared_to_bf16_alone():
    """Whatever ran in turn with others, or in another group."""
    step = {"section": "alone", "group": "step", "baseline_ms": None, "uses": []}
    rows = [
        {**step, "name": "delayed", "ms": 4.0},
        {**step, "name": "bf16", "ms": 6.0},
        {**step, "name": "bf16", "ms": 9.0, "group": "gradient"},
        {**step, "name": "bf16", "ms": 8.0, "section": "block", "baseline_ms": 8.0},
        {**step, "name": "block", "ms": 5.0, "group": "another"},
    ]
    tables.derive(rows, True)
    assert [r["ratio"] for r in rows] == [1.5, 1.0, 1.0, 1.0, None]


def test_the_times_of_a_program_alone_are_of_its_second_half(monkeypatch):
    """A clock that falls after half of the time: the slow calls count, two in each run."""
    now = iter([0.0] + [0.01 * i for i in range(1, 51)] + [0.5 + 0.02 * i for i in range(1, 60)])
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: next(now))
    found = device_time.steady(cases.Timed(lambda: jnp.zeros(()), calls=2), 1.5)
    assert found["ms"] == pytest.approx(10.0)
    assert found["clock"] == "host"


def test_each_call_of_the_fifteen_minutes_finds_its_groups():
    text = (ROOT / "benchmarks/fifteen_minutes.sh").read_text(encoding="utf-8")
    calls = re.findall(r"^ +(\d+)\) gpu 1 '?([a-z,]+)'?(?: '(.*)')? ;;$", text, re.M)
    found = {}
    with on_path("benchmarks"):
        sections_of_gpu = importlib.import_module("gpu").SECTIONS
        for number, sections, pattern in calls:
            names = [
                group.name
                for section in sections.split(",")
                for group in harness.named(sections_of_gpu[section][0])(cases.Settings())
            ]
            found[int(number)] = sum(bool(re.search(pattern, name)) for name in names)
    assert found == {1: 4, 2: 8, 4: 6, 5: 6, 7: 4, 8: 2, 9: 4, 10: 7, 11: 2}
