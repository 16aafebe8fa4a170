"""Which grouped products the kernels for Hopper compute: asked for a GPU with a JAX that has them.

`test_grouped_kernels.py` has the rest, which needs that JAX.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import jfp8
from jfp8 import recipes
from jfp8.kernels import grouped as by_kernels


@pytest.fixture
def why_not(monkeypatch):
    """The question, as if every GPU were a Hopper; `on` says why it would be none."""

    def ask(recipe, rhs=None, on=None):
        backend = replace(by_kernels.mosaic.BACKEND, why_not_on=lambda gpu: on)
        monkeypatch.setattr(by_kernels, "mosaic", SimpleNamespace(BACKEND=backend))
        return by_kernels.why_not_grouped_kernels(recipe, rhs is not None, None)

    return ask


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        recipes.Float8BlockScaling(),
        recipes.Unscaled(),
    ],
    ids=repr,
)
def test_what_they_compute(why_not, recipe):
    assert why_not(recipe) is None
    assert why_not(recipe, on="a GPU of another kind") == "a GPU of another kind"
    stored = jfp8.quantize(jnp.ones((2, 4, 4)))
    assert "stored in FP8" in why_not(recipe, stored)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (recipes.RowwiseScaling(), "whose lhs is quantized as Rowwise"),
        (recipes.MXFP8BlockScaling(), "whose lhs is quantized as Blockwise"),
        (recipes.NVFP4BlockScaling(), "rotated"),
        (recipes.DelayedScaling(accumulation="hopper"), "accumulation='hopper'"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_they_do_not_compute(why_not, recipe, reason):
    assert reason in why_not(recipe)
