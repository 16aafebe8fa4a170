"""The planning calculator, against numbers by hand and the table of the page."""

import re
from pathlib import Path

import pytest

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
plan = imported("plan", "benchmarks")


def test_times_by_hand():
    """Round numbers: 48 k elements of kernels, 1024 tokens, everything at one unit per second."""
    model = plan.Model(width=64, layers=1, vocabulary=100, sequence=32, batch=32)
    assert model.kernels == 12 * 64**2 == 49152
    unit = {"data": 1.0, "fsdp": 1.0, "tensor": 1.0}
    devices = plan.Devices(data=2, fsdp=2, tensor=2)
    bf16 = plan.seconds(model, devices, plan.BF16, plan.Rates(1.0, 2.0, 1.0, unit))
    fp8 = plan.seconds(model, devices, plan.PRODUCTS, plan.Rates(1.0, 2.0, 1.0, unit))
    layers, logits, attention = 6 * 49152 * 1024, 6 * 6400 * 1024, 6 * 1024 * 32 * 64
    assert bf16["products"] == (layers + logits + attention) / 8
    assert fp8["products"] == (layers / 2 + logits + attention) / 8

    # Per device: kernels and logits in quarters, tables in halves; f32 and 16 bits.
    tables = (100 + 32) * 64 + 3 * 2 * 64
    share = (49152 + 6400) / 4 + tables / 2
    assert bf16["optimizer"] == share * (2 * 4 + 4 + 2 * 8)
    assert bf16["data"] == 2 * 1 / 2 * share * 2
    whole = (49152 + 6400) / 2 + tables
    assert bf16["fsdp"] == 1 / 2 * 2 * (2 * 49152 / 2 + 6400 / 2 + tables + whole)
    assert bf16["tensor"] == 5 * 2 * 1 / 2 * (1024 / 4 * 64) * 2

    sent = bf16["data"] + bf16["fsdp"] + bf16["tensor"]
    assert bf16["in_turn"] == bf16["products"] + sent + bf16["optimizer"]
    assert bf16["overlapped"] == bf16["products"] + bf16["tensor"] + bf16["optimizer"]
    slow = plan.Rates(1.0, 2.0, 1.0, {**unit, "data": 1e-5})
    waiting = plan.seconds(model, devices, plan.BF16, slow)
    assert waiting["overlapped"] == pytest.approx(
        bf16["data"] * 1e5 + bf16["fsdp"] + bf16["tensor"] + bf16["optimizer"]
    )


def test_the_table_of_the_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs/scaling_out.md").read_text()
    (command,) = re.findall(r"\$ python benchmarks/plan\.py ((?:.*\\\n)*.*)\n", page)
    plan.main(command.replace("\\\n", " ").split())
    head, table = capsys.readouterr().out.strip().split("\n\n")
    assert head in page
    printed = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    times = [f"| {cells[5]} | {cells[-2]} | {cells[-1]} |" for cells in printed]
    shown = page.partition(head)[2].split("\n\n")[1].splitlines()[2:]
    assert len(shown) >= 5
    assert [row for row in shown if not row.endswith(tuple(times))] == []
