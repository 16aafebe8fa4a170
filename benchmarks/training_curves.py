"""Draw `parity.py --curves`: training losses of all recipes, and gaps to float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gap_curves import gap_curve

from jfp8.plot.style import BLACK, BLUE, GRAY, VERMILION, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 2  # columns of the gaps
FAR = 10.0  # times the gap of the median recipe: written down instead of drawn
# Means of successive steps of one task, by recipe and seed; None where they are not finite.
Curves = dict[str, dict[str, list[float | None]]]


def draw(tasks: dict[str, Curves], reference: str, mean_of: int, margin: float) -> Figure:
    """Draw the mean losses of each task, on the left, next to a panel for each recipe's gap.

    Each number is a mean of `mean_of` steps, and drawn where they end. All seeds are seeds of the
    `reference`, too. Between -margin and margin, which is shaded, a gap would not matter.
    """
    from matplotlib.figure import Figure

    found = {title: _gaps(curves, reference) for title, curves in tasks.items()}
    heights = [1.2 + 0.85 * math.ceil(len(near) / COLUMNS) for near, _ in found.values()]
    figure = Figure((7.0, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(tasks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, curves) in zip(parts, tasks.items(), strict=True):
        near, far = found[title]
        exact = curves[reference]
        steps = mean_of * np.arange(1, 1 + len(next(iter(exact.values()))))
        inside = sum(abs(_last_gap(curves, reference, label)) <= margin for label in near)
        heading = (
            f"{title[0].upper()}{title[1:]}, {len(exact)} seeds: {inside} of "
            f"{len(near) + len(far)} trainings end within {margin} % of {reference}"
        )
        part.suptitle(heading, fontsize="medium")
        left, right = part.subfigures(1, 2, width_ratios=[2, 3])
        _draw_losses(left.subplots(), steps, curves, reference, far)
        _draw_gaps(right, steps, curves, reference, near, margin)
    return figure


def _array(of_seeds: dict[str, list[float | None]], seeds: list[str]) -> np.ndarray:
    return np.array([of_seeds[seed] for seed in seeds], np.float64)


def _gaps(curves: Curves, reference: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the largest mean gap of drawn recipes, and of recipes that are too far away."""
    largest = {}
    for label, of_seeds in curves.items():
        if label != reference:
            exact = _array(curves[reference], list(of_seeds))
            gaps = 100 * (_array(of_seeds, list(of_seeds)) / exact - 1)
            largest[label] = float(np.abs(gaps.mean(axis=0)).max())
    finite = [gap for gap in largest.values() if math.isfinite(gap)]
    limit = FAR * float(np.median(finite)) if finite else 0.0
    near = {label: gap for label, gap in largest.items() if gap <= limit}
    return near, {label: gap for label, gap in largest.items() if label not in near}


def _last_gap(curves: Curves, reference: str, label: str) -> float:
    """The mean gap of a recipe at the end, in percent."""
    seeds = list(curves[label])
    ends = (_array(curves[name], seeds)[:, -1] for name in (label, reference))
    return float(100 * (np.divide(*ends) - 1).mean())


def _draw_losses(
    ax: Any, steps: np.ndarray, curves: Curves, reference: str, far: dict[str, float]
) -> None:
    means = {label: _array(of, list(of)).mean(axis=0) for label, of in curves.items()}
    for label, mean in means.items():
        if label not in far:
            ax.plot(steps, mean, color=BLUE, linewidth=1.2)
    ax.plot(steps, means[reference], color=BLACK, linewidth=2.2, linestyle=(0, (1, 1.2)))
    one_line = f"{reference} (dotted) and\n{len(means) - 1 - len(far)} others, on one line"
    middle = len(steps) // 2
    note = {"fontsize": "small", "textcoords": "offset points", "ha": "center"}
    ax.annotate(one_line, (steps[middle], means[reference][middle]), (6, 18), **note)
    for label, gap in far.items():
        ax.plot(steps, means[label], color=VERMILION, linewidth=1.8, linestyle="--")
        beyond = f"its gap, up to {gap:.0f} %,\nis not drawn" if math.isfinite(gap) else "diverges"
        last = float(np.nanmax(means[label], initial=0.0))
        words = label.replace(": ", ":\n") + f"\n({beyond})"
        at = (steps[middle], last)
        ax.annotate(words, at, (0, -14), va="top", color=VERMILION, **note)
    tidy(ax, "step", "loss, mean of the seeds")
    ax.set_xlim(0, None)


def _draw_gaps(
    figure: Any,
    steps: np.ndarray,
    curves: Curves,
    reference: str,
    near: dict[str, float],
    margin: float,
) -> None:
    told = "mean, with its\nlast value, and 90 % interval; gray: within"
    heading = f"gap to {reference} of the same seed, %: {told} ±{margin}"
    figure.suptitle(heading, fontsize="small")
    rows = math.ceil(len(near) / COLUMNS) or 1
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for label, ax in zip(near, panels, strict=False):
        runs, seeds = curves[label], list(curves[label])
        exact = _array(curves[reference], seeds)
        gap_curve(ax, label, _array(runs, seeds), exact, steps)
        ax.axhspan(-margin, margin, color=GRAY, alpha=0.2, linewidth=0, zorder=0)
        end = format(ax.lines[0].get_ydata()[-1], "+.2f").replace("-", "−")
        ax.text(0.99, 0.05, end, transform=ax.transAxes, ha="right", fontsize="small")
        ax.set_title(label, fontsize="small", loc="left", pad=2)
        ax.tick_params(labelsize="small")
        ax.set(xlabel="", ylabel="")
        ax.grid(visible=False)
    for ax in panels[len(near) :]:
        ax.set_axis_off()
    limit = 1.35 * max([margin, *near.values()])
    panels[0].set_ylim(-limit, limit)
    figure.supxlabel("step", fontsize="medium")
