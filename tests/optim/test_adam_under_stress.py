"""Updates of Adam with stored moments under gradients that are hard to store.

Oracle: `optax.scale_by_adam` in f32 on the same gradients, see `benchmarks/adam_under_stress.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from jfp8.optim.adam import DEFAULT
from jfp8.optim.storage import Float
from support.scripts import imported


@pytest.fixture(scope="module")
def under_stress():
    return imported("adam_under_stress", "benchmarks")


def worst(of_stress, first=0) -> float:
    return np.abs(of_stress["bias"][first:]).max()


def check(found, bound=0.05):
    """Of each group, in every step.

    A mean of 2048 elements whose noise is at most 26 % has a standard error below 0.6 %. The
    largest of all steps and groups is within 5 of them, 3 %, which leaves 2 % for a bias.
    """
    assert found
    for name, of_stress in found.items():
        assert worst(of_stress) < bound, (name, worst(of_stress))
        assert of_stress["noise"].max() < 0.3, (name, of_stress["noise"].max())


@pytest.mark.slow
def test_updates_are_within_5_percent(under_stress):
    """From the first step to 120 steps after gradients fell or leapt."""
    check(under_stress.updates(DEFAULT, 320))


@pytest.mark.slow
@pytest.mark.parametrize("b2", [0.999, 0.95])
def test_updates_are_within_5_percent_for_4000_steps(under_stress, b2):
    check(under_stress.updates(DEFAULT, 4200, b2))


@pytest.mark.slow
def test_with_f32_moments_updates_are_exact(under_stress):
    check(under_stress.updates(type(DEFAULT)(Float(), Float()), 320), 1e-5)
