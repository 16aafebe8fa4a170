"""The planning calculator for mixtures of experts, against numbers by hand and copies counted."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]


sizes, experts, plan = (
    imported(name, "benchmarks") for name in ("expert_bytes", "plan_experts", "plan")
)
# Matrices [128, 2 * 32] and [32, 128] of each of 8 experts: 12288 elements; 20 copies.
TINY = sizes.Model(128, 32, experts=8, per_token=2, tokens=10)
ROWS = sizes.precisions("block", 2)  # bf16, FP8 matmuls, and both kinds of casts


def arrays_of_a_row(encoding, width):
    """What is sent of a row, as arrays."""
    if encoding in ("f32", "bf16"):
        return [np.zeros(width, {"f32": np.float32, "bf16": np.float16}[encoding])]
    scales = {
        "tensor": np.zeros(0, np.float32),
        "row": np.zeros(1, np.float32),
        "block": np.zeros(width // 128, np.float32),
        "mx": np.zeros(width // 32, np.uint8),
    }
    return [np.zeros(width, np.uint8), scales[encoding]]


@pytest.mark.parametrize("encoding", ["f32", "bf16", "tensor", "row", "block", "mx"])
@pytest.mark.parametrize("padded", [False, True])
def test_what_leaves_a_device(encoding, padded):
    """4 devices with 2 experts each; device 1 has 8 tokens, whose 16 copies use all 8 equally."""
    width, me = 256, 1
    to = Counter(expert // 2 for token in range(8) for expert in (token, (token + 3) % 8))
    away = sum(16 if padded else to[device] for device in range(4) if device != me)
    of_row = sum(array.nbytes for array in arrays_of_a_row(encoding, width))
    assert sizes.dispatch_bytes(8, 2, width, 4, encoding, padded=padded) == away * of_row
    assert sizes.combine_bytes(8, 2, width, 4, encoding, padded=padded) == away * of_row


def test_bytes_by_hand():
    """Experts in fours, so 2 of them, or 24576 elements; half of that with tensor parallelism."""
    mesh = sizes.Mesh(expert=4, data=2, fsdp=2, tensor=2)
    assert mesh.elements(TINY) == 12288
    same = {
        "combine": 2 * 15 * 256,
        "counts": 3 * 8 * 4,
        "data": 2 * 1 / 2 * 6144 * 2,
        "tensor": 2 * (2 * 1 / 2) * 20 * 128 * 4,
    }
    bf16 = {"dispatch": 2 * 15 * 256, "fsdp": 2 * 6144 * 2 + 6144 * 2}
    fp8 = {"dispatch": 2 * 15 * (128 + 4), "fsdp": 2 * 6144 + 6144 * 2}
    for row, own in zip(ROWS, (bf16, bf16, fp8, fp8), strict=True):
        assert sizes.wire(TINY, mesh, row) == {**same, **own}
    f32 = sizes.wire(TINY, mesh, sizes.precisions("block", 4)[0])
    assert f32["data"] == 2 * same["data"]
    assert f32["fsdp"] == 2 * 6144 * 2 + 6144 * 4


def test_memory_by_hand():
    """20 rows are expected of 40; results at home are 20 rows of 128 in bf16."""
    mesh, home, gate = sizes.Mesh(expert=2), 20 * 256, 2 * 64
    bf16 = 2 * (128 + 32) + gate
    fp8 = (128 + 4) + (32 + 4) + gate
    for row, kept in zip(ROWS, (bf16, fp8, fp8, fp8), strict=True):
        found = sizes.memory(TINY, mesh, row, 1.25)
        assert found == {
            "expected": home + 20 * kept,
            "capacity": home + 4 * 7 * kept,  # for each of 4 experts, ceil(1.25 * 40 / 8)
            "worst": home + 40 * kept,
        }
    halved = sizes.memory(TINY, sizes.Mesh(expert=2, tensor=2), ROWS[0], 1.25)["expected"]
    assert halved == home + 20 * (2 * (128 + 16) + gate / 2)


def test_casts_by_hand():
    """8 where the wire is bf16: four operands, two directions. 10 tokens, 20 copies."""
    assert [sum(row.casts) for row in ROWS] == [0, 8, 12, 2]
    mesh = sizes.Mesh(expert=4, fsdp=2)
    weights = 6 * 24576 / 2
    tokens, copies, hidden, gate = 10 * 128, 20 * 128, 20 * 32, 20 * 64
    by_kernels = 2 * hidden + 2 * gate
    elements = [0, 4 * copies + by_kernels, tokens + 7 * copies + by_kernels, tokens + copies]
    for row, cast in zip(ROWS, elements, strict=True):
        assert experts.cast_bytes(TINY, mesh, row) == weights + 3 * cast


def test_links_of_axes():
    """Rates of 8 and 1: what is within a node of 8, and what is not."""
    of = lambda **axes: experts.links(sizes.Mesh(**axes), nvlink=8.0, network=1.0)
    assert of(expert=8, fsdp=4) == {"tensor": 8, "expert": 8, "fsdp": 1, "data": 1}
    assert of(expert=2, fsdp=4, data=2) == {"tensor": 8, "expert": 8, "fsdp": 8, "data": 1}
    # The node has 7 of 15 others, and one of 3 others with tensor=4: the rest by the network.
    assert of(expert=16)["expert"] == pytest.approx(15 / 8)
    assert of(expert=4, tensor=4)["expert"] == pytest.approx(3 / 2)
    assert of(expert=4, tensor=8)["expert"] == 1
    # NVLink decides where it is the slower one for what it has to send.
    assert experts.links(sizes.Mesh(expert=16), 1.0, 100.0)["expert"] == pytest.approx(15 / 7)


def test_times_by_hand():
    mesh = sizes.Mesh(expert=2, data=2, fsdp=2, tensor=2)
    links = {"data": 2.0, "fsdp": 4.0, "tensor": 5.0, "expert": 8.0}
    rates = plan.Rates(1.0, 2.0, 1e30, links)
    sent = sizes.wire(TINY, mesh, ROWS[1])
    times = experts.seconds(TINY, mesh, ROWS[1], rates, alpha=3.0)
    exchanged = (2 * 10 * 256 + 2 * 10 * 256 + 8 * 4) / 8 + 5 * 3.0
    assert times["exchange"] == exchanged
    assert times["weights"] == sent["data"] / 2 + sent["fsdp"] / 4
    assert times["tensor"] == 2 * (2 * 1 / 2) * 20 * 128 * 4 / 5
    products = 6 * 20 * 12288 / 2 / 2
    assert times["products"] == products
    assert times["casts"] == pytest.approx(0)
    parts = ("products", "casts", "exchange", "weights", "tensor")
    assert times["in_turn"] == pytest.approx(sum(times[part] for part in parts))
    assert products > times["weights"]
    exposed = exchanged + times["tensor"]
    assert times["overlapped"] == pytest.approx(products + exposed)
    slow = plan.Rates(1.0, 2.0, 1e30, {**links, "fsdp": 1e-5})
    waiting = sent["data"] / 2 + sent["fsdp"] * 1e5
    found = experts.seconds(TINY, mesh, ROWS[1], slow, alpha=3.0)["overlapped"]
    assert found == pytest.approx(waiting + exposed)


def test_the_table_of_the_page_is_what_the_command_prints(capsys):
    """How many times as fast as bf16 each precision is."""
    page = (ROOT / "docs/scaling_out.md").read_text()
    (command,) = re.findall(r"`python benchmarks/plan_experts\.py (.*?)`", page)
    experts.main(command.split())
    cells = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[4:]]
    gains = {(row[0].strip("| "), row[1]): row[-2] for row in cells}
    matmuls = "FP8 matmuls only"
    figures = (gains["8", matmuls], gains["64", matmuls], gains["64", "FP8, 2 casts"])
    text = " ".join(page.partition(f"plan_experts.py {command}")[2].split())
    assert re.findall(r"\b\d\.\d\d\b", text) == [*figures]
