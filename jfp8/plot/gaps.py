"""`gaps`: how far runs in FP8 lie from those in high precision, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jfp8.debug.equivalence import equivalence
from jfp8.plot.style import BLUE, GREEN, GREY, VERMILION, axes_for, legend_above, tidy

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes

# Colour and marker of the mean, by verdict: markers tell them apart in print.
_LOOK = {"equivalent": (GREEN, "o"), "different": (VERMILION, "D"), "cannot be told": (BLUE, "s")}


def gaps(
    runs: Mapping[str, jax.typing.ArrayLike],
    *,
    margin: float = 0.25,
    confidence: float = 0.9,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Gaps of paired runs, a row for each recipe: every pair, their mean, and its interval.

    The mean is in the middle of its interval; its marker and colour show the verdict of
    `jfp8.debug.equivalence`. The grey dots below are the pairs. Between the dashed lines, at
    ``-margin`` and ``margin``, a gap would not matter.

    Args:
      runs: ``{name: f64[n_pairs]}``, two or more pairs each, drawn from top to bottom.
      margin, confidence: see `jfp8.debug.equivalence`.
      limit: end the axes at ``-limit`` and ``limit``. An arrow at the end stands for what lies
        beyond, with the number beside it if it is a mean. None: show everything.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes, with a row at height 0, 1, ... for each name.

    Raises:
      ValueError: nothing to draw; `limit` not above `margin`; what `equivalence` refuses.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> ax = jfp8.plot.gaps({"delayed": [0.06, 0.15, 0.15], "current": [-0.53, 0.16, 0.25]})
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['delayed', 'current']
    """
    if not runs:
        raise ValueError(
            "gaps got no runs. Pass a dict of names and gaps, such as "
            '{"delayed": 100 * (losses / losses_f32 - 1)}, each f64[n_pairs].'
        )
    if limit is not None and not limit > margin:
        raise ValueError(
            f"limit={limit!r}: must be above the margin, {margin:g}, which it would hide."
        )
    found = {
        name: equivalence(of_run, margin=margin, confidence=confidence)
        for name, of_run in runs.items()
    }

    title = f"Paired runs: is their mean gap within ±{margin:g}?"
    ax = axes_for(ax, 7.0, 1.2 + 0.4 * len(runs), title)
    end = np.inf if limit is None else limit
    ax.axvspan(-margin, margin, color=GREY, alpha=0.15, linewidth=0)
    for x, style in ((-margin, "--"), (0.0, "-"), (margin, "--")):
        ax.axvline(x, color=GREY, linewidth=1, linestyle=style)
    named = set()
    for y, (name, of_run) in enumerate(runs.items()):
        values, about = np.asarray(of_run, np.float64), found[name]
        colour, marker = _LOOK[about.verdict]
        ax.plot(values, np.full(values.shape, y + 0.22), "o", color=GREY, ms=4, mew=0, alpha=0.8)
        label = None if about.verdict in named else about.verdict
        named.add(about.verdict)
        ax.plot([about.low, about.high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
        ax.plot(about.mean, y, marker, color=colour, ms=7, mec="white", label=label)
        for side in (-1, 1):
            if max(side * about.low, side * about.high, *(side * values)) > end:
                ax.plot(side * 0.985 * end, y, ">" if side > 0 else "<", color=GREY, ms=6)
        if abs(about.mean) > end:
            side = np.sign(about.mean)
            where, align = (side * 0.95 * end, y), "right" if side > 0 else "left"
            text, on = (
                f"{about.mean:+.3g}".replace("-", "−"),
                {"facecolor": "white", "linewidth": 0},
            )
            ax.text(*where, text, color=colour, ha=align, va="center", bbox=on | {"pad": 1})
    if limit is not None:
        ax.set_xlim(-limit, limit)
    ax.set_yticks(range(len(runs)), runs)
    ax.set_ylim(len(runs) - 0.5, -0.5)
    tidy(ax, f"gap: every pair, the mean, and its {100 * confidence:g} % interval")
    ax.grid(visible=False)
    legend_above(ax, columns=3)
    return ax
