"""`error_map` draws the numbers of the comparisons, each recipe once."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest

import jfp8
import jfp8.plot
from jfp8.debug.comparison import ComparedGradient, ComparedProduct, Comparison, ProductError

pytest.importorskip("matplotlib")


def compared(a, b, totals, gradients=()):
    """`totals` is ``{(layer, product): (error a, error b)}``; other parts are fractions of it."""
    return Comparison(
        jfp8.recipes.get(a),
        jfp8.recipes.get(b),
        tuple(
            ComparedProduct(layer, (), product, *(ProductError(e, e / 2, e / 4) for e in errors))
            for (layer, product), errors in totals.items()
        ),
        tuple(ComparedGradient(path, *errors, 1.0, 1.0) for path, errors in gradients),
        *(1.0, 1.0, 1.0),
    )


FIRST = compared(
    "delayed",
    "mxfp8",
    {
        ("net/a", "fprop"): (0.02, 0.04),
        ("net/a", "wgrad"): (0.03, 0.01),
        ("net/b", "fprop"): (0.5, 0.06),
    },
    [("net/a/kernel", (0.5, 0.25)), ("net/b/kernel", (0.125, 1.0))],
)
SECOND = compared(
    "mxfp8", "nvfp4", {("net/a", "fprop"): (9.0, 0.08), ("net/b", "fprop"): (9.0, 0.16)}
)


def numbers(ax):
    return ax.collections[0].get_array()


def labels(ax):
    return [[t.get_text() for t in ticks] for ticks in (ax.get_xticklabels(), ax.get_yticklabels())]


def test_a_row_is_a_layer_with_its_worst_product_and_a_column_a_recipe():
    ax = jfp8.plot.error_map([FIRST, SECOND])
    assert labels(ax) == [["delayed", "mxfp8", "nvfp4"], ["a", "b"]]
    np.testing.assert_allclose(numbers(ax), [[3, 4, 8], [50, 6, 16]], rtol=1e-12)
    assert [t.get_text() for t in ax.texts] == ["3", "4", "8", "50", "6", "16"]
    assert ax.get_ylim() == (2, 0)  # downwards


@pytest.mark.parametrize(("part", "share"), [("total", 1), ("cast", 1 / 2), ("product", 1 / 4)])
def test_parts_of_the_error(part, share):
    drawn = numbers(jfp8.plot.error_map(FIRST, part))
    np.testing.assert_allclose(drawn, share * np.array([[3, 4], [50, 6]]), rtol=1e-12)


def test_gradients_by_parameter():
    ax = jfp8.plot.error_map(FIRST, "gradient")
    assert labels(ax)[1] == ["a/kernel", "b/kernel"]
    assert numbers(ax).tolist() == [[50.0, 25.0], [12.5, 100.0]]


def test_dark_is_bad_and_colours_mean_the_same_everywhere():
    errors = (0.0, 0.001, 0.01, 0.1, 1.0, 7.0, np.inf)
    rows = {(str(i), "fprop"): (error, error) for i, error in enumerate(errors)}
    mesh = jfp8.plot.error_map(compared("delayed", "mxfp8", rows)).collections[0]
    assert mesh.get_clim() == (0.1, 100.0)
    shades = mesh.cmap(mesh.norm(mesh.get_array()))[:, 0]
    assert shades[0][3] == 0  # no error leaves the paper white
    light = shades[1:, :3].mean(axis=1)
    assert np.all(np.diff(light[:4]) < -0.1)
    assert light[3] == light[4] == light[5]


def test_nan_is_hatched():
    rows = {("a", "fprop"): (np.nan, 0.1), ("a", "dgrad"): (0.5, 0.05)}
    ax = jfp8.plot.error_map(compared("delayed", "mxfp8", rows))
    assert numbers(ax).tolist() == [[None, 10.0]]
    (squares,) = ax.collections[1:]
    assert squares.get_hatch()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["no number"]


@pytest.mark.slow
def test_recipes_of_one_name_are_told_apart():
    plain, wide = jfp8.recipes.DelayedScaling(), jfp8.recipes.DelayedScaling(margin=2)
    x = jax.random.normal(jax.random.key(0), (16, 8))
    found = jfp8.debug.compare(nn.Sequential([nn.Dense(8), nn.Dense(4)]), plain, wide, x)
    ax = jfp8.plot.error_map(found)
    assert labels(ax) == [[repr(plain), repr(wide)], ["layers_0"]]
    worst = [max(getattr(row, side).total for row in found.products) for side in "ab"]
    np.testing.assert_allclose(numbers(ax)[0], 100 * np.array(worst))


def test_refuses():
    with pytest.raises(ValueError, match="error_map got no comparisons"):
        jfp8.plot.error_map([])
    with pytest.raises(TypeError, match="but got a dict"):
        jfp8.plot.error_map([{}])
    with pytest.raises(ValueError, match="part='fprop': must be one of 'total', 'cast'"):
        jfp8.plot.error_map(FIRST, "fprop")
    other = compared("mxfp8", "nvfp4", {("c", "fprop"): (0.1, 0.1)})
    with pytest.raises(ValueError, match="one has the layers net/a, net/b, another c"):
        jfp8.plot.error_map([FIRST, other])
