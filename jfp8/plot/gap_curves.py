"""`gap_curves`: how far runs in FP8 lie from those in high precision, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.debug.equivalence import t_quantile
from jfp8.plot.loss_curves import label_of, numbered
from jfp8.plot.style import GREY, axes_for, line, tidy

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes


def gap_curves(
    runs: Mapping[str, jax.typing.ArrayLike],
    reference: jax.typing.ArrayLike,
    *,
    steps: jax.typing.ArrayLike | None = None,
    confidence: float = 0.9,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The mean gap of paired runs in percent, over the steps, in a band that is its interval. ::

        gap  = 100 (loss / reference - 1)            of two runs from the same seed, in every step
        band = mean(gap) -+ t std(gap) / sqrt(n)     as `jfp8.debug.equivalence` has it, of n seeds

    The interval is that of each step by itself. A run that is no longer finite has no gap: the
    curve ends before the first of them, with a cross, and the legend says how many there are.

    Args:
      runs: ``{name: f32[n_seeds, n_steps]}``, or ``f32[n_steps]`` for a single seed, which has no
        band.
      reference: losses of the same seeds, in the same order, in high precision, of the same shape.
      steps: number of each step, ``i32[n_steps]``; None counts from 0.
      confidence: of the interval, such as 0.9.
      limit: end the y axis at ``-limit`` and ``limit``, in percent. None: show everything.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes, with one line for each name in the order of `runs`, before all others.

    Raises:
      ValueError: nothing to draw; runs that do not have the shape of the reference, or a reference
        that is not positive everywhere; `confidence` not between 0 and 1; `limit` not above 0.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> ax = jfp8.plot.gap_curves({"FP8": [[3.0, 2.02], [3.0, 2.04]]}, [[3.0, 2.0], [3.0, 2.0]])
    >>> ax.lines[0].get_ydata().round(6).tolist()
    [0.0, 1.5]
    """
    if not runs:
        raise ValueError(
            "gap_curves got no runs. Pass a dict of names and losses, and the losses in high "
            'precision: gap_curves({"FP8": losses_fp8}, losses), each f32[n_seeds, n_steps].'
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r}: must be between 0 and 1, such as 0.9.")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit!r}: must be above 0, in percent; or None.")
    exact = np.atleast_2d(np.asarray(reference, np.float64))
    curves = {name: np.atleast_2d(np.asarray(losses, np.float64)) for name, losses in runs.items()}
    shapes = {name: losses.shape for name, losses in curves.items()}
    if exact.ndim != 2 or not exact.size or set(shapes.values()) != {exact.shape}:
        raise ValueError(
            f"reference has the shape {exact.shape}, and runs {shapes}: both must be "
            "f32[n_seeds, n_steps], a pair for each seed."
        )
    if not (np.isfinite(exact) & (exact > 0)).all():
        raise ValueError(
            "reference must be finite and positive in every step: gaps are in percent of it. "
            "Leave out seeds that diverge in high precision, and their pairs."
        )
    n, n_steps = exact.shape
    steps = numbered(steps, n_steps)

    ax = axes_for(ax, 7.0, 3.2, "Gap to the reference over the steps")
    # On axes with curves, go on with the next style.
    offset = sum(not str(drawn.get_label()).startswith("_") for drawn in ax.lines)
    for i, (name, losses) in enumerate(curves.items()):
        _draw(ax, name, 100 * (losses / exact - 1), steps, confidence, line(offset + i))
    ax.axhline(0.0, color=GREY, linewidth=1, zorder=0.5)
    if limit is not None:
        ax.set_ylim(-limit, limit)
    ax.locator_params(axis="x", integer=True)
    tidy(ax, "step", f"mean gap, %\n(band: {100 * confidence:g} % interval)" if n > 1 else "gap, %")
    ax.legend(frameon=False)
    return ax


def _draw(
    ax: Axes, name: str, gaps: np.ndarray, steps: np.ndarray, confidence: float, style: Any
) -> None:
    finite, n = np.isfinite(gaps), len(gaps)
    end = int(finite.all(axis=0).cumprod().sum())  # the first step without a pair
    gaps, at = gaps[:, :end], steps[:end]
    mean = gaps.mean(axis=0)
    ax.plot(at, mean, label=label_of(name, finite), linewidth=1.8, **style)
    if n > 1:
        half = t_quantile((1 + confidence) / 2, n - 1) * gaps.std(axis=0, ddof=1) / math.sqrt(n)
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        ax.fill_between(at, mean - half, mean + half, **band)
    if end and not finite.all():
        ax.plot(at[-1], mean[-1], "X", color=style["color"], ms=8, mec="white")
