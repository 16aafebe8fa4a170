"""The planning calculators: the tables of the page, and copies sent to experts, counted."""

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


def arrays_of_a_row(encoding, width):
    """Return the arrays that are sent of a row."""
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


def test_the_table_of_dense_models_is_what_the_command_prints(capsys):
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
