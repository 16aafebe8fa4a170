"""The picture of `parity.py --curves`: training losses of all recipes, and gaps to float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

import jfp8

COLUMNS = 3
# Of one task: by recipe and seed the means of successive steps, None where they are not finite.
Curves = dict[str, dict[str, list[float | None]]]


def draw(path: Path, tasks: dict[str, Curves], reference: str, mean_of: int) -> None:
    """For each task its mean losses, above a panel for the gap of each recipe.

    Each number is a mean of `mean_of` steps, and drawn where they end. All seeds are seeds of the
    `reference`, too.
    """
    import png
    from matplotlib.figure import Figure

    rows = {title: math.ceil((len(of) - 1) / COLUMNS) or 1 for title, of in tasks.items()}
    heights = [3.4 + 1.25 * n for n in rows.values()]
    figure = Figure((7.0, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(tasks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, curves) in zip(parts, tasks.items(), strict=True):
        n = len(next(iter(curves[reference].values())))
        steps = mean_of * np.arange(1, n + 1)
        above, below = part.subfigures(2, 1, height_ratios=[3.0, 0.4 + 1.25 * rows[title]])
        _losses(above, title, steps, curves)
        _gaps(below, rows[title], steps, curves, reference)
    png.save(figure, path)


def _array(of_seeds: dict[str, list[float | None]], seeds: list[str]) -> np.ndarray:
    return np.array([of_seeds[seed] for seed in seeds], np.float64)


def _losses(figure: Any, title: str, steps: np.ndarray, curves: Curves) -> None:
    ax = figure.subplots()
    means = {label: _array(of, list(of)).mean(axis=0) for label, of in curves.items()}
    jfp8.plot.loss_curves(means, steps=steps, ax=ax)
    ax.set_ylabel("mean loss of the seeds")
    ax.set_title(f"{title}: training loss", fontsize="medium")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="x-small")


def _gaps(figure: Any, rows: int, steps: np.ndarray, curves: Curves, reference: str) -> None:
    figure.suptitle(
        f"gap to {reference} of the same seed: mean, and its 90 % interval", fontsize="medium"
    )
    exact = curves[reference]
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    compared = [label for label in curves if label != reference]
    ends = {}
    for label, ax in zip(compared, panels, strict=False):
        seeds = list(curves[label])
        runs = {label: _array(curves[label], seeds)}
        jfp8.plot.gap_curves(runs, _array(exact, seeds), steps=steps, ax=ax)
        (told,) = (text.get_text() for text in ax.get_legend().get_texts())
        ax.get_legend().remove()
        ax.set_title(f"{told}, n = {len(seeds)}", fontsize="x-small", pad=3)
        ax.tick_params(labelsize="x-small")
        ax.set(xlabel="", ylabel="")
        ends[label] = ax.lines[0].get_ydata()
    for ax in panels[len(compared) :]:
        ax.set_axis_off()
    # Of most recipes; what a control has beyond that is written, not drawn.
    largest = [np.abs(gaps).max(initial=0.0) for gaps in ends.values()] or [0.0]
    limit = 3 * float(np.median(largest)) or 1.0
    panels[0].set_ylim(-limit, limit)
    for end, ax in zip(ends.values(), panels, strict=False):
        if end.size and abs(end[-1]) > limit:
            text = f"{end[-1]:+.0f} % at the end"
            ax.text(0.5, 0.8, text, transform=ax.transAxes, ha="center", fontsize="x-small")
    figure.supxlabel("step", fontsize="small")
    figure.supylabel("gap, %", fontsize="small")
