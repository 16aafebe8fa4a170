"""Draw the error of every layer under several recipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.debug.compare import Comparison
from jfp8.plot.style import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDS = (0.1, 100.0)  # percent: of the colors

LABELS = {
    "total": "error of the worst matmul of each layer",
    "gradient": "error of the gradient of each parameter",
}


def error_map(ax: Axes, comparisons: Iterable[Comparison], part: str) -> None:
    """Draw relative errors in percent: layers downwards, in program order, and recipes across.

    Columns are the recipes of all `comparisons`, each once. Of a layer's matmuls the worst counts.
    The colors mean the same in every picture, from 0.1 to 100 % on a logarithmic scale. Dark is
    bad.

    Args:
      ax: axes to draw on. A bar of colors is put next to them.
      comparisons: results of `jfp8.debug.compare` for one model and batch.
      part: ``"total"``, the error of matmuls on exact inputs; or ``"gradient"``, the error of the
        whole model's gradient with respect to each parameter, in which errors of layers add up.
    """
    columns: dict[str, dict[str, float]] = {}
    for comparison in comparisons:
        for recipe, side in ((comparison.recipe_a, "a"), (comparison.recipe_b, "b")):
            columns.setdefault(recipe.name, _errors(comparison, part, side))
    layers = list(next(iter(columns.values())))
    percent = 100 * np.array([[errors[layer] for errors in columns.values()] for layer in layers])
    _draw(ax, percent)
    ax.set_title(LABELS[part], fontsize="small", loc="left")
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=9, **turned)
    ax.set_yticks(np.arange(len(layers)) + 0.5, shorten(layers), fontsize=9)
    ax.tick_params(length=0)
    ax.set_ylim(len(layers), 0)
    ax.set_xlabel("recipe")
    ax.grid(visible=False)


def _errors(comparison: Comparison, part: str, side: str) -> dict[str, float]:
    """Return the errors under one of both recipes, by layer or parameter."""
    if part == "gradient":
        return {g.path: getattr(g, f"error_{side}") for g in comparison.gradients}
    found: dict[str, float] = {}
    for row in comparison.products:
        layer, error = row.layer or "(no layer)", getattr(row, side).total
        found[layer] = float(np.maximum(found.get(layer, 0.0), error))  # a NaN stays
    return found


def _draw(ax: Axes, percent: np.ndarray) -> None:
    """Draw the map, its numbers, and its bar of colors."""
    import matplotlib
    from matplotlib.colors import LogNorm

    mesh = ax.pcolormesh(percent, cmap=matplotlib.colormaps["cividis_r"], norm=LogNorm(*ENDS))
    for (y, x), error in np.ndenumerate(percent):
        color = "white" if error > 3 else "black"  # percent, in 0.1 to 100
        where = {"ha": "center", "va": "center", "fontsize": 8.5}
        ax.text(x + 0.5, y + 0.5, _text(error), color=color, **where)
    bar = ax.figure.colorbar(mesh, ax=ax, aspect=25)
    bar.set_label("error, %", fontsize=9)
    bar.set_ticks([0.1, 1.0, 10.0, 100.0], labels=["0.1", "1", "10", "100"])
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_linewidth(0.5)
    bar.minorticks_off()


def _text(percent: float) -> str:
    """Format with two digits, or three from 100 on; nothing below 0.01 or above 1000."""
    if 0 < percent < 0.01:
        return "< 0.01"
    if percent > 999:
        return "> 999"
    return f"{percent:.3g}" if percent >= 99.5 else f"{percent:.2g}"
