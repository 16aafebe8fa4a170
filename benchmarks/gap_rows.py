"""Draw final gaps of runs in FP8 to runs in high precision, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from equivalence import equivalence

from jfp8.plot.style import BLUE, GRAY, GREEN, VERMILION, legend_above, tidy

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes

# Color and marker of the mean, by verdict: markers tell them apart in print.
_LOOK = {"equivalent": (GREEN, "o"), "different": (VERMILION, "D"), "inconclusive": (BLUE, "s")}


def gap_rows(
    ax: Axes,
    runs: Mapping[str, jax.typing.ArrayLike],
    *,
    margin: float,
    confidence: float,
    limit: float = np.inf,
) -> None:
    """Draw gaps of paired runs, a row for each recipe: every pair, their mean, and its interval.

    The mean is in the middle of its interval; its marker and color show the verdict of
    `equivalence.equivalence`. The gray dots below are the pairs. Between the dashed lines, at
    ``-margin`` and ``margin``, a gap would not matter.

    Args:
      ax: axes to draw on.
      runs: ``{name: f64[n_pairs]}``, two or more pairs each, drawn from top to bottom.
      margin, confidence: see `equivalence.equivalence`.
      limit: end the axes at ``-limit`` and ``limit``. An arrow at the end stands for values
        beyond, with the number next to it if it is a mean.
    """
    ax.axvspan(-margin, margin, color=GRAY, alpha=0.15, linewidth=0)
    for x, style in ((-margin, "--"), (0.0, "-"), (margin, "--")):
        ax.axvline(x, color=GRAY, linewidth=1, linestyle=style)
    named = set()
    for y, of_run in enumerate(runs.values()):
        values = np.asarray(of_run, np.float64)
        about = equivalence(values, margin=margin, confidence=confidence)
        color, marker = _LOOK[about.verdict]
        ax.plot(values, np.full(values.shape, y + 0.22), "o", color=GRAY, ms=4, mew=0, alpha=0.8)
        label = None if about.verdict in named else about.verdict
        named.add(about.verdict)
        ax.plot([about.low, about.high], [y, y], color=color, linewidth=2.2, solid_capstyle="butt")
        ax.plot(about.mean, y, marker, color=color, ms=7, mec="white", label=label)
        for side in (-1, 1):
            if max(side * about.low, side * about.high, *(side * values)) > limit:
                ax.plot(side * 0.985 * limit, y, ">" if side > 0 else "<", color=GRAY, ms=6)
        if abs(about.mean) > limit:
            side = np.sign(about.mean)
            where, align = (side * 0.95 * limit, y), "right" if side > 0 else "left"
            text = f"{about.mean:+.3g}".replace("-", "−")
            paper = {"facecolor": "white", "linewidth": 0, "pad": 1}
            ax.text(*where, text, color=color, ha=align, va="center", bbox=paper)
    if np.isfinite(limit):
        ax.set_xlim(-limit, limit)
    ax.set_yticks(range(len(runs)), runs)
    ax.set_ylim(len(runs) - 0.5, -0.5)
    tidy(ax, f"gap: every pair, the mean, and its {100 * confidence:g} % interval")
    ax.grid(visible=False)
    legend_above(ax)
