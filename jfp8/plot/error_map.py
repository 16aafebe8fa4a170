"""`error_map`: the error of every layer under several recipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jfp8.debug.comparison import Comparison
from jfp8.plot.maps import NOTHING, hatch, shorten
from jfp8.plot.style import axes_for, legend_above
from jfp8.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = Literal["total", "cast", "product", "gradient"]
PARTS = ("total", "cast", "product", "gradient")
ENDS = (0.1, 100.0)  # percent: of the colours

_LABELS = {
    "total": "error of the worst product of each layer",
    "cast": "error by rounding the operands, in the worst product of each layer",
    "product": "error by multiplying, in the worst product of each layer",
    "gradient": "error of the gradient by each parameter",
}


def error_map(
    comparisons: Comparison | Iterable[Comparison],
    part: Part = "total",
    *,
    ax: Axes | None = None,
) -> Axes:
    """Relative errors in percent: layers downwards in the order of the program, recipes across.

    Columns are the recipes of all `comparisons`, each once. Of a layer's products the worst counts.
    The colours mean the same in every picture, from 0.1 to 100 % on a logarithmic scale. Dark is
    bad. What is hatched has no number (NaN).

    Args:
      comparisons: what `jfp8.debug.compare` returned, once or more often, for the same model and
        batch.
      part: ``"total"``, ``"cast"`` or ``"product"``, the errors of products on exact inputs, see
        `jfp8.debug.compare`; or ``"gradient"``, the error of the whole model's gradient by each
        parameter, in which errors of all layers add up.
      ax: axes to draw on; None for new ones. A bar of colours is put beside it.

    Returns:
      The axes. ``ax.collections[0]`` holds the errors in percent, ``[layers, recipes]``.

    Raises:
      TypeError: something else than comparisons.
      ValueError: none of them; comparisons of models with different layers; an unknown `part`.
      ImportError: matplotlib is missing.

    >>> import flax.linen as nn, jax, jfp8
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    >>> ax = jfp8.plot.error_map(jfp8.debug.compare(model, "current", "nvfp4", x))
    >>> [label.get_text() for label in ax.get_xticklabels()], ax.collections[0].get_array().shape
    (['current', 'nvfp4'], (1, 2))
    """
    columns = _columns(comparisons, part)
    layers = list(next(iter(columns.values())))
    percent = 100 * np.array([[errors[layer] for errors in columns.values()] for layer in layers])
    size = (min(2.4 + 1.0 * len(columns), 7.0), max(1.4 + 0.26 * len(layers), 2.4))
    label = _LABELS[part]
    heading = label if ax is not None else ""
    ax = axes_for(ax, *size, title=f"{label[0].upper()}{label[1:]}")
    _draw(ax, percent, heading)
    names = [recipe.name for recipe in columns]
    named = [n if names.count(n) == 1 else repr(r) for n, r in zip(names, columns, strict=True)]
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    how = turned if len(columns) > 5 or max(map(len, named)) > 12 else {}
    ax.set_xticks(np.arange(len(named)) + 0.5, named, fontsize=9, **how)
    ax.set_yticks(np.arange(len(layers)) + 0.5, shorten(layers), fontsize=9)
    ax.tick_params(length=0)
    ax.set_ylim(len(layers), 0)
    ax.set_xlabel("recipe")
    ax.grid(visible=False)
    return ax


def _columns(comparisons: Any, part: Part) -> dict[Recipe, dict[str, float]]:
    """Collect the errors under each recipe, of the same layers for all."""
    several = (comparisons,) if isinstance(comparisons, Comparison) else tuple(comparisons)
    for comparison in several:
        if not isinstance(comparison, Comparison):
            raise TypeError(
                "error_map takes what jfp8.debug.compare returned, but got a "
                f"{type(comparison).__name__}."
            )
    if not several:
        raise ValueError(
            "error_map got no comparisons. Make some: "
            'error_map([jfp8.debug.compare(model, "delayed", "mxfp8", x)]).'
        )
    if part not in PARTS:
        raise ValueError(f"part={part!r}: must be one of {', '.join(map(repr, PARTS))}.")
    columns: dict[Recipe, dict[str, float]] = {}
    for comparison in several:
        for recipe, side in ((comparison.recipe_a, "a"), (comparison.recipe_b, "b")):
            columns.setdefault(recipe, _errors(comparison, part, side))
    layers, *others = map(tuple, columns.values())
    for other in others:
        if other != layers:
            raise ValueError(
                "The comparisons are of different models: one has the layers "
                f"{', '.join(layers[:8])}, another {', '.join(other[:8])}. Draw each by itself."
            )
    return columns


def _errors(comparison: Comparison, part: Part, side: str) -> dict[str, float]:
    """By layer or parameter, of one of the two recipes."""
    if part == "gradient":
        return {g.path: getattr(g, f"error_{side}") for g in comparison.gradients}
    found: dict[str, float] = {}
    for row in comparison.products:
        layer, error = row.layer or "(no layer)", getattr(getattr(row, side), part)
        found[layer] = float(np.maximum(found.get(layer, 0.0), error))  # a NaN stays
    return found


def _draw(ax: Axes, percent: np.ndarray, label: str) -> None:
    """The map, its numbers, and its bar of colours."""
    import matplotlib
    from matplotlib.colors import LogNorm

    shown = np.where(np.isinf(percent), ENDS[1], percent)  # zeros stay white
    masked = np.ma.masked_array(shown, np.isnan(shown))
    mesh = ax.pcolormesh(masked, cmap=matplotlib.colormaps["cividis_r"], norm=LogNorm(*ENDS))
    hatch(ax, np.isnan(percent), *NOTHING)
    if len(ax.collections) > 1:
        legend_above(ax, columns=1, title=label)
    else:
        ax.set_title(label, fontsize="small", loc="left")
    if percent.size <= 200:
        for y, x in np.argwhere(~np.isnan(percent)):
            dark = percent[y, x] > 3  # of 0.1 to 100
            where = {"ha": "center", "va": "center", "fontsize": 8.5}
            text = _text(percent[y, x])
            ax.text(x + 0.5, y + 0.5, text, color="white" if dark else "black", **where)
    bar = ax.figure.colorbar(mesh, ax=ax, aspect=25)
    bar.set_label("error, %", fontsize=9)
    bar.set_ticks([0.1, 1.0, 10.0, 100.0], labels=["0.1", "1", "10", "100"])
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_linewidth(0.5)
    bar.minorticks_off()


def _text(percent: float) -> str:
    """Two digits, or three from 100 on; nothing below 0.01 or above 1000."""
    if 0 < percent < 0.01:
        return "< 0.01"
    if percent > 999:
        return "> 999"
    return f"{percent:.3g}" if percent >= 99.5 else f"{percent:.2g}"
