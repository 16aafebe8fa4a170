"""`error_against_bits` draws bits counted by hand, and errors that NumPy and ml_dtypes give."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import jfp8
import jfp8.plot
from jfp8.quantizers import Blockwise, Current

pytest.importorskip("matplotlib")

from matplotlib.text import Text

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
TOKENS, FEATURES = 64, 256
NORMAL = np.random.default_rng(0).normal(size=(TOKENS, FEATURES)).astype(np.float32)
OUTLIERS = NORMAL * np.where(np.arange(FEATURES) % 64 == 5, np.float32(2.0**15), np.float32(1))


def blocks(x, k):
    return x.reshape(len(x), -1, k)


def one_scale(x, dtype, most):
    scale = np.abs(x).max() / np.float32(most)
    return (x / scale).astype(dtype).astype(np.float32) * scale


def by_rows(x):
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(1, keepdims=True) / 448))
    return (x / scale).astype(E4M3).astype(np.float32) * scale


def in_blocks(k):
    return lambda x: by_rows(blocks(x, k).reshape(-1, k)).reshape(x.shape)


def nvfp4(x, target=6, reach=448 * 6, axis=None):
    """An E4M3 scale for 16 values, and one above them all, or above each row."""
    large = reach / np.abs(x).max(axis, keepdims=True)[..., None]
    scale = (np.abs(blocks(x, 16)).max(2, keepdims=True) / target * large).astype(E4M3)
    inverse = np.where(scale == 0, 0, large / scale.astype(np.float32))
    data = np.clip(blocks(x, 16) * inverse, -6, 6).astype(E2M1).astype(np.float32)
    return (data * scale.astype(np.float32) / large).reshape(x.shape)


def four_over_six(x):
    six, four = (nvfp4(x, target, 256 * 6) for target in (6, 4))
    error = lambda y: (blocks(y - x, 16) ** 2).sum(2, keepdims=True)
    return np.where(error(four) < error(six), blocks(four, 16), blocks(six, 16)).reshape(x.shape)


def mxfp4(x):
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks(x, 32)).max(2, keepdims=True) / 6))
    return ((blocks(x, 32) / scale).astype(E2M1).astype(np.float32) * scale).reshape(x.shape)


FAKE = {
    "delayed": lambda x: one_scale(x, E4M3, 448),
    "current": lambda x: one_scale(x, E4M3, 448),
    "hybrid": lambda x: one_scale(x, E4M3, 448),
    "rowwise": by_rows,
    "block": in_blocks(128),
    "mxfp8": in_blocks(32),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "nvfp4_4over6": four_over_six,
    "nvfp4_row": lambda x: nvfp4(x, axis=1),
    "quartet_ii": four_over_six,
    "direct_e5m2": lambda x: np.clip(x, -57344, 57344).astype(E5M2).astype(np.float32),
    "unscaled": lambda x: np.clip(x, -448, 448).astype(E4M3).astype(np.float32),
}
ELEMENTS = TOKENS * FEATURES
BITS = dict.fromkeys(FAKE, 8 + 32 / ELEMENTS) | {
    "rowwise": 8 + 32 / FEATURES,
    "block": 8 + 32 / 128,
    "mxfp8": 8 + 8 / 32,
    "mxfp4": 4 + 8 / 32,
    **dict.fromkeys(("nvfp4", "nvfp4_4over6", "quartet_ii"), 4 + 8 / 16 + 32 / ELEMENTS),
    "nvfp4_row": 4 + 8 / 16 + 32 / FEATURES,
}


def drawn(ax):
    """By the name of each recipe, where its point is."""
    points = [tuple(point) for point in ax.lines[0].get_xydata().tolist()]
    texts = {t.xy: t.get_text() for t in ax.texts if hasattr(t, "xy")}
    assert set(texts) == set(points)
    return {name: xy for xy, text in texts.items() for name in text.split(":")[0].split(", ")}


def relative(approximate, x):
    """Of each feature, then the root mean square."""
    exact = x.astype(np.float64)
    features = np.linalg.norm(approximate - exact, axis=0) / np.linalg.norm(exact, axis=0)
    return np.sqrt(np.mean(features**2))


@pytest.mark.slow
@pytest.mark.parametrize("x", [NORMAL, OUTLIERS], ids=["normal", "outliers"])
def test_every_recipe_has_its_bits_and_its_error(x):
    ax = jfp8.plot.error_against_bits(x)
    points = drawn(ax)
    assert set(points) == {recipe.name for recipe in jfp8.recipes.RECIPES} == set(FAKE)
    for name, fake in FAKE.items():
        bits, error = points[name]
        assert bits == BITS[name], name
        assert error == pytest.approx(relative(fake(x), x), rel=2e-3), name
    assert points["delayed"] == points["current"] == points["hybrid"]
    bf16 = relative(x.astype(ml_dtypes.bfloat16).astype(np.float32), x)
    assert ax.lines[1].get_ydata()[0] == pytest.approx(bf16, rel=1e-6)


@pytest.mark.slow
def test_blocks_keep_an_outlier_from_other_features():
    names = {"delayed": "delayed", "mxfp8": "mxfp8"}
    small, large = (drawn(jfp8.plot.error_against_bits(x, names)) for x in (NORMAL, OUTLIERS))
    assert large["delayed"][1] > 3 * small["delayed"][1]
    assert large["mxfp8"][1] < 2 * small["mxfp8"][1]


@pytest.mark.slow
def test_takes_quantizers_and_more_dimensions():
    given = {"a": Current(jfp8.E5M2), "b": Blockwise(jfp8.E4M3FN, (64, 1)), "c": "mxfp8"}
    points = drawn(jfp8.plot.error_against_bits(NORMAL.reshape(2, -1, FEATURES), given))
    assert points["a"][1] == pytest.approx(relative(one_scale(NORMAL, E5M2, 57344), NORMAL), 1e-3)
    assert points["b"][0] == 8 + 32 / 64
    assert points["c"] == drawn(jfp8.plot.error_against_bits(NORMAL, given))["c"]


@pytest.mark.slow
def test_names_do_not_touch():
    ax = jfp8.plot.error_against_bits(NORMAL)
    ax.figure.draw_without_rendering()
    named = [text for text in ax.texts if hasattr(text, "xy")]
    # Without the lines to the points.
    boxes = sorted(map(Text.get_window_extent, named), key=lambda box: box.y0)
    assert len(boxes) > 4
    for lower, upper in zip(boxes, boxes[1:]):
        assert lower.y1 <= upper.y0 + 1


def test_refuses():
    wrong = np.where(np.arange(FEATURES) == 3, np.nan, NORMAL)
    for x, shape in ((np.ones(8), "(8,)"), (np.zeros((2, 8)), "(2, 8)"), (wrong, "(64, 256)")):
        with pytest.raises(ValueError, match="features") as error:
            jfp8.plot.error_against_bits(x)
        assert shape in str(error.value)
    with pytest.raises(ValueError, match="quantizers is empty"):
        jfp8.plot.error_against_bits(NORMAL, {})
    nothing = jfp8.recipes.PerOperand(
        fprop=jfp8.recipes.Product(None, Current(jfp8.E4M3FN)),
        dgrad=jfp8.recipes.Product(None, None),
        wgrad=jfp8.recipes.Product(None, None),
    )
    with pytest.raises(ValueError, match="'mine': .* leaves the left operand"):
        jfp8.plot.error_against_bits(NORMAL, {"mine": nothing})
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        jfp8.plot.error_against_bits(NORMAL, {"mine": jfp8.E4M3FN})
