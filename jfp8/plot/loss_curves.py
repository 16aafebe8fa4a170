"""`loss_curves`: training runs side by side, with the spread of their seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.plot.style import axes_for, line, tidy

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes


def loss_curves(
    runs: Mapping[str, jax.typing.ArrayLike],
    *,
    steps: jax.typing.ArrayLike | None = None,
    window: int = 1,
    ax: Axes | None = None,
) -> Axes:
    """Draw losses over the steps: the mean over the seeds, in a band of their range.

    The band reaches from the smallest to the largest loss of the seeds, because a standard
    deviation of two or three seeds says little. A seed whose loss becomes NaN or Inf counts up to
    there; its last finite loss is marked, and the legend says how many seeds did so.

    Args:
      runs: ``{name: f32[n_seeds, n_steps]}``, or ``f32[n_steps]`` for a single seed.
      steps: number of each step, ``i32[n_steps]``; None counts from 0.
      window: average each curve over the last `window` steps before it is drawn, because batches
        differ more than recipes do. The first ``window - 1`` steps are not drawn.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes, with one line for each name in the order of `runs`.

    Raises:
      ValueError: nothing to draw; runs with different numbers of steps; a window longer than these.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> ax = jfp8.plot.loss_curves({"f32": [[3.0, 2.0, 1.0], [3.0, 1.0, 1.0]], "FP8": [3.0, 2, 1]})
    >>> [line.get_label() for line in ax.lines], ax.lines[0].get_ydata().tolist()
    (['f32', 'FP8'], [3.0, 1.5, 1.0])
    """
    curves = {name: np.atleast_2d(np.asarray(losses, np.float64)) for name, losses in runs.items()}
    if not curves:
        raise ValueError(
            "loss_curves got no runs. Pass a dict of names and losses, such as "
            '{"float32": losses, "FP8": losses_fp8}, each f32[n_seeds, n_steps] or f32[n_steps].'
        )
    shapes = {name: losses.shape for name, losses in curves.items()}
    if any(losses.ndim != 2 or not losses.size for losses in curves.values()):
        raise ValueError(
            f"Losses must be f32[n_seeds, n_steps] or f32[n_steps], and not empty; got {shapes}."
        )
    n_steps = next(iter(shapes.values()))[1]
    if any(shape[1] != n_steps for shape in shapes.values()):
        raise ValueError(
            "The runs must have the same number of steps (the second of each shape), but have "
            f"{shapes}. Cut them to one length, or draw each with its own steps= on the same ax=."
        )
    steps = _numbered(steps, n_steps)
    if not 1 <= window <= n_steps:
        raise ValueError(f"window={window!r}: must be from 1 to {n_steps}, the number of steps.")

    spread = any(losses.shape[0] > 1 for losses in curves.values())
    title = "Loss over the steps" + (": mean and range of the seeds" if spread else "")
    ax = axes_for(ax, 7.0, 3.6, title)
    offset = len(ax.lines)  # on axes with curves, go on with the next style
    for i, (name, losses) in enumerate(curves.items()):
        # f64[n, steps - window + 1], the mean of every `window` successive columns.
        smooth = np.lib.stride_tricks.sliding_window_view(losses, window, axis=1).mean(axis=-1)
        _draw(ax, name, smooth, steps[window - 1 :], line(offset + i))
    ax.locator_params(axis="x", integer=True)
    tidy(ax, "step", "loss" if window == 1 else f"loss, mean of {window} steps")
    ax.legend(frameon=False)
    return ax


def _numbered(steps: jax.typing.ArrayLike | None, n_steps: int) -> np.ndarray:
    steps = np.arange(n_steps) if steps is None else np.asarray(steps)
    if steps.shape != (n_steps,):
        raise ValueError(f"The runs have {n_steps} steps, but steps has the shape {steps.shape}.")
    return steps


def label_of(name: str, finite: np.ndarray) -> str:
    """Name a run, with the number of seeds that end; `finite` is ``bool[n_seeds, n_steps]``."""
    lost = int((~finite).any(axis=1).sum())
    return name + (f" ({lost} of {len(finite)} not finite)" if lost else "")


def _draw(ax: Axes, name: str, losses: np.ndarray, steps: np.ndarray, style: Any) -> None:
    finite = np.isfinite(losses)
    seeds = np.ma.masked_invalid(losses)  # NaN in a step where no seed is left
    mean, low, high = (
        np.ma.filled(statistic, np.nan)
        for statistic in (seeds.mean(axis=0), seeds.min(axis=0), seeds.max(axis=0))
    )
    ax.plot(steps, mean, label=label_of(name, finite), linewidth=1.8, **style)
    if len(losses) > 1:
        ax.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
    for seed in np.flatnonzero(finite[:, 0] & ~finite.all(axis=1)):
        last = int(np.argmin(finite[seed])) - 1
        ax.plot(steps[last], losses[seed, last], "X", color=style["color"], ms=8, mec="white")
