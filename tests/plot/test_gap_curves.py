"""`gap_curves` draws means and intervals from tables of Student's distribution."""

from __future__ import annotations

import numpy as np
import pytest

import jfp8
import jfp8.plot
from jfp8.plot import style

pytest.importorskip("matplotlib")

rng = np.random.default_rng(0)
EXACT = rng.uniform(2, 3, size=(4, 6))
RUN = EXACT * (1 + rng.normal(0.01, 0.005, size=EXACT.shape))
T = {0.9: 2.3533634348018264, 0.5: 0.7648923284043453}  # of 3 degrees of freedom, from tables


def band(ax, i=0):
    """Lower and upper ends at each step."""
    vertices = ax.collections[i].get_paths()[0].vertices
    steps = sorted(set(vertices[:, 0]))
    return np.array([[f(vertices[vertices[:, 0] == x, 1]) for f in (min, max)] for x in steps]).T


@pytest.mark.parametrize("confidence", T)
def test_the_mean_gap_lies_in_its_interval(confidence):
    steps = 25 * np.arange(1, 7)
    ax = jfp8.plot.gap_curves({"FP8": RUN}, EXACT, steps=steps, confidence=confidence)
    gaps = 100 * (RUN / EXACT - 1)
    mean, half = gaps.mean(0), T[confidence] * gaps.std(0, ddof=1) / 2
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), steps)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), mean, rtol=1e-12)
    np.testing.assert_allclose(band(ax), [mean - half, mean + half], rtol=1e-6)
    told = jfp8.debug.equivalence(gaps[:, 2], confidence=confidence)
    np.testing.assert_allclose(band(ax)[:, 2], [told.low, told.high], rtol=1e-9)


def test_one_seed_has_no_interval():
    ax = jfp8.plot.gap_curves({"FP8": RUN[0]}, EXACT[0])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 100 * (RUN[0] / EXACT[0] - 1))
    assert not ax.collections


def test_a_run_that_diverges_ends_the_curve():
    lost = RUN.copy()
    lost[1, 3:] = np.nan
    ax = jfp8.plot.gap_curves({"FP8": lost, "all": np.full_like(RUN, np.inf)}, EXACT)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["FP8 (1 of 4 not finite)", "all (4 of 4 not finite)"]
    curve, cross = ax.lines[:2]
    assert curve.get_xdata().tolist() == [0, 1, 2]
    assert cross.get_marker() == "X"
    assert cross.get_xdata() == [2]


def test_goes_on_with_the_next_style():
    ax = jfp8.plot.gap_curves({"a": RUN, "b": EXACT}, EXACT)
    jfp8.plot.gap_curves({"c": RUN}, EXACT, ax=ax, limit=2.0)
    named = {drawn.get_label(): drawn.get_color() for drawn in ax.lines}
    assert [named[name] for name in "abc"] == [style.line(i)["color"] for i in range(3)]
    assert ax.get_ylim() == (-2, 2)


def test_refuses():
    with pytest.raises(ValueError, match="gap_curves got no runs"):
        jfp8.plot.gap_curves({}, EXACT)
    with pytest.raises(ValueError, match=r"shape \(4, 6\), and runs {'a': \(4, 5\)}"):
        jfp8.plot.gap_curves({"a": RUN[:, 1:]}, EXACT)
    with pytest.raises(ValueError, match="finite and positive in every step"):
        jfp8.plot.gap_curves({"a": RUN}, EXACT - 2.5)
    with pytest.raises(ValueError, match=r"6 steps, but steps has the shape \(2,\)"):
        jfp8.plot.gap_curves({"a": RUN}, EXACT, steps=[1, 2])
    with pytest.raises(ValueError, match="confidence=90: must be between 0 and 1"):
        jfp8.plot.gap_curves({"a": RUN}, EXACT, confidence=90)
    with pytest.raises(ValueError, match="limit=0: must be above 0"):
        jfp8.plot.gap_curves({"a": RUN}, EXACT, limit=0)
