"""The table of tunix's GRPO with a sampler in 4 bits, against the runs that it is of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_runs():
    script = imported("rl_mismatch", "benchmarks")
    runs = json.loads(script.RESULTS.read_text())["runs"]
    assert script.table(runs) in (ROOT / "docs/trainers/tunix.md").read_text()
    for found in runs.values():
        rewards, k3 = (np.array([run[name] for run in found]) for name in ("reward", "k3"))
        assert rewards.shape == k3.shape == (3, 60)
        assert np.all(rewards[:, -10:].mean(1) > 2 * rewards[:, :10].mean(1))
    plain, rounded, aware = (np.max([run["k3"] for run in runs[way]]) for way in script.WAYS)
    assert 0 < aware < 2 * plain < 1e-12 < 1e-3 < rounded


def test_the_sampler_dequantizes_as_compressed_tensors_does():
    """Two codes in a byte, the first in its lower half, times a power of two for 32 of them."""
    script = imported("rl_mismatch", "benchmarks")
    packed = np.zeros((1, 32), np.uint8)
    packed[0, :2] = [0x72, 0x0F]  # 1, 6; -6, 0
    packed[0, 16] = 0x09  # -0.5, 0
    scale = np.array([[128, 126]], np.uint8)
    stored = {"a.weight_packed": packed, "a.weight_scale": scale, "b": np.ones(2)}
    found = script.dequantized(stored)
    assert sorted(found) == ["a.weight", "b"]
    expected = np.zeros((1, 64), np.float32)
    expected[0, :4], expected[0, 32] = [2, 12, -12, 0], -0.25
    np.testing.assert_array_equal(found["a.weight"], expected)
