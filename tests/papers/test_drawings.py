"""Pictures of the benchmarks: intervals from tables of Student's t, errors by ml_dtypes."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def draw(monkeypatch):
    """Call a function of a file of benchmarks/ with new axes; return these."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def call(file, function, *args, **kwargs):
        ax = Figure(layout="constrained").subplots()
        getattr(importlib.import_module(file), function)(ax, *args, **kwargs)
        return ax

    return call


EXACT = np.random.default_rng(0).uniform(2, 3, size=(4, 6))
RUN = EXACT * np.random.default_rng(1).normal(1.01, 0.005, size=EXACT.shape)
STEPS = 25 * np.arange(1, 7)


@pytest.mark.parametrize(("confidence", "t"), [(0.9, 2.3533634348), (0.5, 0.7648923284)])
def test_the_mean_gap_lies_in_its_interval(draw, confidence, t):
    ax = draw("gap_curves", "gap_curve", "FP8", RUN, EXACT, STEPS, confidence)
    gaps = 100 * (RUN / EXACT - 1)
    mean, half = gaps.mean(0), t * gaps.std(0, ddof=1) / 2
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), STEPS)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), mean, rtol=1e-12)
    x, y = ax.collections[0].get_paths()[0].vertices.T
    ends = [[f(y[x == step]) for step in STEPS] for f in (min, max)]
    np.testing.assert_allclose(ends, [mean - half, mean + half], rtol=1e-6)


def test_gaps_are_dots_with_a_mean_in_its_interval(draw):
    runs = {"near": [-0.1, 0.0, 0.1], "far": [0.9, 1.0, 1.1], "wide": [-1.0, 0.0, 1.0]}
    ax = draw("gap_rows", "gap_rows", runs, margin=0.25, confidence=0.9)
    half = 2.919986 / np.sqrt(3)  # of a table of Student's t: 95 %, 2 degrees of freedom
    means = {"near": (0.0, 0.1, "o"), "far": (1.0, 0.1, "D"), "wide": (0.0, 1.0, "s")}
    for y, (name, gaps) in enumerate(runs.items()):
        mean, spread, marker = means[name]
        dots, interval, middle = ax.lines[3 + 3 * y : 6 + 3 * y]  # three lines across come first
        assert {*interval.get_ydata(), *middle.get_ydata()} == {y}
        assert list(dots.get_xdata()) == gaps
        expected = [mean - half * spread, mean + half * spread]
        np.testing.assert_allclose(interval.get_xdata(), expected, atol=1e-6)
        np.testing.assert_allclose(middle.get_xdata(), [mean], atol=1e-12)
        assert middle.get_marker() == marker
    assert [label.get_text() for label in ax.get_yticklabels()] == list(runs)
    assert ax.get_ylim() == (2.5, -0.5)  # the first on top
