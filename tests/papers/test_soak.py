"""Long trainings with random faults, `benchmarks/soak.py`: short every day, and 20,000 steps."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]

soak = imported("soak", "benchmarks")


def assert_nothing_broke(result):
    """What must hold of any run, however long."""
    assert result["non_finite_parameters"] == 0
    assert result["scales_checked"] > 0
    assert result["frozen_scales"] == result["wrong_amaxes"] == 0
    assert result["traces"] == {"step": 1, "loss_fn": 1}
    assert result["compilations_until_the_first_check"] > 0, "the counter does not count"
    assert result["compilations_after_it"] == 0
    first, last = result["live_arrays"]
    assert first == last
    # Beside NaN and Inf, a number close to the largest of float32 may overflow, and a loss scale
    # that has grown too far.
    faults = result["faults"]
    assert result["steps_that_must_be_skipped"] > 0
    excess = result["steps_skipped"] - result["steps_that_must_be_skipped"]
    huge = sum(faults.get(kind, 0) for kind in ("inf", "-inf", "largest", "-3e38", "times 1e12"))
    assert 0 <= excess <= huge + result["steps_skipped_without_faults"] + 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "hybrid"])
def test_20000_steps(recipe):
    result = soak.soak(20_000, recipe, "O2", seed=1)
    if recipe == "hybrid":  # has no histories
        result |= {"scales_checked": 1}
    assert_nothing_broke(result)
    assert result["faults_in_all"] > 1000
    assert result["loss"] < 1.25 * result["loss_without_faults"]
    first, last = result["resident_megabytes"]
    assert last - first < 50


def test_the_committed_result():
    result = json.loads((ROOT / "benchmarks/results/soak.json").read_text())
    assert result["steps"] == 20_000
    assert_nothing_broke(result)
    assert set(result["faults"]) == set(soak.FAULTS)
    assert result["loss"] < 1.25 * result["loss_without_faults"]


@pytest.mark.slow
def test_every_fault_is_in_the_operand_that_is_named():
    """A soak that finds nothing must be one that would find something."""
    x = jax.numpy.arange(1.0, 13.0).reshape(3, 4)
    for place in soak.PLACES:
        for kind, fault in soak.FAULTS.items():
            given = soak.injected(place, kind, element=17)
            hurt = np.asarray(soak.hurt(x, place, given))
            changed = ~((hurt == x) | (np.isnan(hurt) & np.isnan(x)))
            assert changed.sum() == (12 if fault.everywhere else 1), (place, kind)
            if not fault.everywhere:
                assert changed[1, 1]  # 17 = 12 + 4 * 1 + 1
            other = soak.PLACES[soak.PLACES.index(place) - 1]
            np.testing.assert_array_equal(soak.hurt(x, other, given), x)
            np.testing.assert_array_equal(soak.hurt(x, place, soak.NOTHING), x)
