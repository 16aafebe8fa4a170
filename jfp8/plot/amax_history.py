"""`amax_history`: how large a tensor was, step by step, and how much its scale could hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jfp8.debug.records import TensorStats, some_rows, steps_of
from jfp8.plot.style import AMBER, BLACK, BLUE, VERMILION, axes_for, legend_above, tidy
from jfp8.scaling.formats import format_called

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def amax_history(
    rows: Iterable[TensorStats], name: str | None = None, *, ax: Axes | None = None
) -> Axes:
    """Draw the amax of one tensor over the steps, and ``scale * fmt.max``, its limit.

    Where the amax is so far above this limit that it no longer rounds to it, elements saturate, and
    the step is marked. The distance below the limit is headroom: each power of two of it takes one
    from the range left for the smallest elements. An amax of zero is marked at the bottom of the
    logarithmic axis, NaN and Inf at its top.

    Args:
      rows: statistics of several steps. Of several for the same step the last one counts. Where the
        scale varies over blocks, the limits of the blocks are a band.
      name: the tensor to draw, a `TensorStats.name` such as ``"Dense_0 lhs"``; required if the
        rows describe several.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes; its y axis is logarithmic.

    Raises:
      ValueError: no rows; rows of several tensors and no `name`, or a name that no row has; only
        some rows have a step.
      TypeError: something other than rows.
      ImportError: matplotlib is missing.

    >>> import jax.numpy as jnp, jfp8
    >>> stats = jfp8.debug.stats(jfp8.scaled_dot_general)
    >>> dimensions = (((1,), (0,)), ((), ()))
    >>> x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    >>> rows = [row for i in range(2) for row in stats(i * x, w, dimensions)[1].rows(step=i)]
    >>> ax = jfp8.plot.amax_history(rows, name=rows[-1].name)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['amax', 'scale · 448, limit of E4M3FN', 'amax is 0']
    """
    rows = _of_tensor(name, some_rows(rows, "amax_history"))
    latest = {row.step or 0: row for row in rows}
    x = np.array(steps_of(rows) or [0])
    rows, n = [latest[step] for step in x.tolist()], len(x)
    title, fmt = rows[0].name, format_called(rows[0].format)
    amax = np.array([row.amax for row in rows])
    least, most = (
        np.array([getattr(row, field) for row in rows]) * fmt.max
        for field in ("scale_min", "scale_max")
    )
    positive = np.where(np.isfinite(amax) & (amax > 0), amax, np.nan)
    saturated = np.array([row.overflow > 0 for row in rows])
    nonfinite = np.array([row.nonfinite > 0 for row in rows])

    heading = title if ax is not None else ""
    ax = axes_for(ax, 7.0, 3.2, f"Amax of {title} over the steps")
    ax.set_yscale("log", base=2)
    ax.plot(x, positive, color=BLUE, marker="o" if n <= 100 else "", ms=3.5, label="amax")
    limit = {"color": BLACK, "linestyle": (0, (4, 1.5)), "drawstyle": "steps-mid"}
    ax.plot(x, most, label=f"scale · {fmt.max:g}, limit of {fmt.name}", **limit)
    if np.any(least < most):
        band = {"color": BLACK, "alpha": 0.15, "linewidth": 0, "label": "in other blocks"}
        ax.fill_between(x, least, most, step="mid", **band)
    data, edge = ax.transData, ax.get_xaxis_transform()  # at the edge, heights are fractions
    low, high = np.full(n, 0.03), np.full(n, 0.97)
    for where, heights, transform, marker, color, label in (
        (saturated, positive, data, "^", VERMILION, f"saturates: {saturated.sum()} of {n} steps"),
        (amax == 0, low, edge, "v", AMBER, "amax is 0"),
        (nonfinite, high, edge, "X", BLACK, "holds NaN or Inf"),
    ):
        if where.any():
            mark = {"color": color, "ms": 7, "zorder": 4, "clip_on": False, "label": label}
            ax.plot(x[where], heights[where], marker, transform=transform, **mark)
    ax.locator_params(axis="x", integer=True)
    ax.minorticks_off()
    _label_magnitudes(ax, np.concatenate([positive, least, most]))
    tidy(ax, "step", "magnitude")
    legend_above(ax, heading)
    return ax


def _label_magnitudes(ax: Axes, heights: np.ndarray) -> None:
    """Label numbers between powers of two as well, where `heights`, above 0, span few of these."""
    from matplotlib.ticker import LogLocator

    heights = heights[np.isfinite(heights)]
    if heights.size and np.ptp(np.log2(heights)) < 3:
        ax.yaxis.set_major_locator(LogLocator(2, (1, 1.25, 1.5, 1.75)))
        ax.yaxis.set_major_formatter("{x:.3g}")


def _of_tensor(name: str | None, rows: Iterable[TensorStats]) -> list[TensorStats]:
    """Choose the rows of one tensor, the only one if there is no `name`."""
    names = list(dict.fromkeys(row.name for row in rows))
    problem = "draws one tensor" if name is None else f"got name={name!r}"
    if name is None and len(names) == 1:
        (name,) = names
    if name not in names:
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"amax_history {problem}, but the rows describe {shown}. Choose one of them: "
            f"amax_history(rows, name={names[0]!r})."
        )
    return [row for row in rows if row.name == name]
