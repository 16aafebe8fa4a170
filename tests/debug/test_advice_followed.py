"""A fault is planted and its advice is followed: the error against float64 has to fall."""

import functools
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

import jfp8
from jfp8 import recipes
from jfp8.debug import advice

ROWS, IN, OUT = 64, 256, 32
RNG = np.random.default_rng(0)
X, W, DY = (
    RNG.normal(size=shape).astype(np.float32) for shape in ((ROWS, IN), (IN, OUT), (ROWS, OUT))
)
CHANNEL = 7


def with_outlier(x, factor, axis):
    """`x` with one row or column that is larger by `factor`."""
    x = x.copy()
    np.moveaxis(x, axis, 0)[CHANNEL] *= np.float32(factor)
    return x


def without(x, axis):
    """`x` with zeros where it meets the outlier, so that only the rest is in the product."""
    return with_outlier(x, 0.0, axis)


@functools.cache
def layer(recipe):
    """A layer that computes its three products, with statistics; None: in high precision."""
    model = nn.Sequential([jfp8.Dense(OUT, use_bias=False, recipe=recipe)])

    def products(x, w, dy):
        with jfp8.autocast(enabled=recipe is not None):
            apply = lambda x, w: model.apply({"params": {"layers_0": {"kernel": w}}}, x)
            y, pull = jax.vjp(apply, x, w)
        return (y, *pull(dy))

    return jax.jit(jfp8.debug.stats(products))


def measured(recipe, x, w, dy):
    """Statistics, and the relative errors of y, dx and dw."""
    found, seen = layer(recipe)(x, w, dy)
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    exact = (x @ w, dy @ w.T, x.T @ dy)
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]
    return seen.rows(), errors


def advised(remedy):
    """The recipe that a remedy names first; None if it says to leave the layer out of FP8."""
    named = re.search(r"(\w+Scaling)\(\)", remedy)
    if named is None:
        assert "exempt the layer" in remedy
        return None
    return getattr(recipes, named[1])()


CHANNEL_OF_X = (with_outlier(X, 2.0**20, 1), without(W, 0), DY)
TOKEN = (with_outlier(X, 2.0**20, 0), W, without(DY, 0))
CHANNEL_OF_DY = (X, without(W, 1), with_outlier(DY, 2.0**36, 1))
# The inputs, which of y, dx and dw suffers, and by how much less after the advice.
FAULTS = {
    "outlier channel, one scale": (recipes.Float8CurrentScaling(), CHANNEL_OF_X, 0, 3),
    "outlier channel, rowwise": (recipes.RowwiseScaling(), CHANNEL_OF_X, 0, 2.5),
    "outlier channel, blocks of 128": (recipes.Float8BlockScaling(), CHANNEL_OF_X, 0, 1.8),
    "outlier channel, nvfp4": (recipes.NVFP4BlockScaling(), CHANNEL_OF_X, 0, 3),
    "outlier token, rowwise": (recipes.RowwiseScaling(), TOKEN, 2, 1.3),
    "outlier channel of the gradient, mxfp8": (recipes.MXFP8BlockScaling(), CHANNEL_OF_DY, 1, 1e3),
    "activations without a scale": (recipes.DirectE5M2(), (X * 1e-6, W, DY), 0, 10),
    "saturated gradients": (recipes.DirectE5M2(), (X, W, DY * 1e6), 1, 5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without its 'fp8'")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_recipe_that_is_advised_helps(fault):
    recipe, inputs, product, factor = FAULTS[fault]
    rows, errors = measured(recipe, *inputs)
    finding = advice(rows).findings[0]
    other = advised(finding.remedy)
    assert (other is None) == (recipe == recipes.MXFP8BlockScaling())  # nothing is finer
    better_rows, better = measured(other, *inputs)
    assert errors[product] > factor * better[product], (finding.remedy, errors, better)
    lost = lambda rows: max([r.underflow + r.overflow for r in rows], default=0.0)
    assert lost(better_rows) < lost(rows)


@pytest.mark.parametrize(("size", "verb"), [(1e-8, "Raise"), (1e6, "Lower")])
def test_a_loss_scale_that_is_advised_helps(size, verb):
    """The factor that the remedy names leaves the error of gradients around 1: of rounding."""
    rows, errors = measured(recipes.DirectE5M2(), X, W, DY * np.float32(size))
    remedy = advice(rows).findings[0].remedy
    found = re.match(rf"{verb} the loss scale by a factor of 2\^(\d+)", remedy)
    assert found, remedy
    factor = np.float32(2.0 ** (int(found[1]) if verb == "Raise" else -int(found[1])))
    _, better = measured(recipes.DirectE5M2(), X, W, DY * np.float32(size) * factor)
    _, rounding = measured(recipes.DirectE5M2(), X, W, DY)
    assert min(errors[1:]) > 0.9
    np.testing.assert_allclose(better, rounding, rtol=0.05)
