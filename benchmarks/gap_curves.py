"""Draw gaps of runs in FP8 to runs in high precision, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from equivalence import t_quantile

from jfp8.plot.loss_curves import label_of
from jfp8.plot.style import GRAY, line, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gap_curve(
    ax: Axes,
    name: str,
    losses: np.ndarray,
    reference: np.ndarray,
    steps: np.ndarray,
    confidence: float = 0.9,
) -> None:
    """Draw the mean gap of paired runs in percent, in a band that is its confidence interval. ::

        gap  = 100 (loss / reference - 1)            of two runs from the same seed, in every step
        band = mean(gap) -+ t std(gap) / sqrt(n)     as in `equivalence.equivalence`, of n seeds

    The curve ends with a cross before the first step in which a run is no longer finite.

    Args:
      ax: axes to draw on.
      name: label of the curve.
      losses, reference: ``f64[n_seeds, n_steps]``, from the same seeds in the same order.
      steps: number of each step.
      confidence: level of the interval.
    """
    gaps = 100 * (losses / reference - 1)
    finite, n = np.isfinite(gaps), len(gaps)
    end = int(finite.all(axis=0).cumprod().sum())  # the first step without a pair
    gaps, at = gaps[:, :end], steps[:end]
    mean, style = gaps.mean(axis=0), line(0)
    ax.plot(at, mean, label=label_of(name, finite), linewidth=1.8, **style)
    if n > 1:
        half = t_quantile((1 + confidence) / 2, n - 1) * gaps.std(axis=0, ddof=1) / math.sqrt(n)
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        ax.fill_between(at, mean - half, mean + half, **band)
    if end and not finite.all():
        ax.plot(at[-1], mean[-1], "X", color=style["color"], ms=8, mec="white")
    ax.axhline(0.0, color=GRAY, linewidth=1, zorder=0.5)
    ax.locator_params(axis="x", integer=True)
    tidy(ax, "step", "mean gap, %")
