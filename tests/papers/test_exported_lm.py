"""The table of exports after quantization-aware training, against the runs that it is of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_runs():
    from scipy import stats

    script = imported("exported_lm", "benchmarks")
    runs = json.loads(script.RESULTS.read_text())["runs"]
    assert len(runs) == 12
    table = script.table(runs)
    assert table in (ROOT / "docs/recipes.md").read_text()
    # One of its intervals, by SciPy.
    gaps = [
        100 * (run["mxfp4, quantization-aware"] - run["mxfp4, rounded after training"]) / run["f32"]
        for run in runs.values()
    ]
    low, high = stats.t.interval(0.9, 11, np.mean(gaps), stats.sem(gaps))
    line = f"| {np.mean(gaps):+.3f} | {low:+.3f} to {high:+.3f} |".replace("-0.", "−0.")
    assert f"| mxfp4, the latter less the former {line}" in table
