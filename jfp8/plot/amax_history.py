"""`amax_history`: how large a tensor was, step by step, and how much its scale could hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.debug.records import TensorStats
from jfp8.plot.histogram import saturates
from jfp8.plot.rows import some_rows, steps_of
from jfp8.plot.style import AMBER, BLACK, BLUE, VERMILION, axes_for, legend_above, tidy
from jfp8.scaling.formats import Format, FormatLike, as_format, format_called

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes


def amax_history(
    amax: jax.typing.ArrayLike | Iterable[TensorStats],
    scale: jax.typing.ArrayLike | None = None,
    fmt: FormatLike | None = None,
    *,
    steps: jax.typing.ArrayLike | None = None,
    name: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the amax of one tensor over the steps, and ``scale * fmt.max``, its limit.

    Where the amax is so far above this limit that it no longer rounds to it, elements saturate, and
    the step is marked. The distance below the limit is headroom: each power of two of it takes one
    from the range left for the smallest elements. An amax of zero is marked at the bottom of the
    logarithmic axis, NaN and Inf at its top.

    Args:
      amax: ``f32[n]``, the amax in every step; or rows of statistics of several steps.
      scale: ``f32[n]``, or one for all steps, ``x ~= data * scale``; None draws the amax alone.
        Rows contain theirs; where it varies over blocks, the limits of the blocks are a band.
      fmt: format that the scale is for. Rows contain theirs.
      steps: ``i32[n]``, number of each step; None counts from 0. Rows contain theirs.
      name: which tensor to draw, a `TensorStats.name` such as ``"Dense_0 lhs"``; required if the
        rows describe several. Of several rows for the same step the last one counts.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes; its y axis is logarithmic.

    Raises:
      ValueError: no steps; shapes that do not fit each other; a scale without a format, or one that
        is not positive; rows of several tensors and no `name`, or a name that no row has; `scale`,
        `fmt` or `steps` together with rows, or `name` together with arrays.
      TypeError: `amax` mixes rows with something else.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> ax = jfp8.plot.amax_history([1.0, 2.0, 9.0, 2.0], [0.01, 0.01, 0.01, 0.02], jfp8.E4M3FN)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['amax', 'scale · 448, limit of E4M3FN', 'saturates: 1 of 4 steps']
    """
    several = amax if isinstance(amax, (list, tuple)) else (amax,)
    if any(isinstance(a, TensorStats) for a in several):
        given = {"scale": scale, "fmt": fmt, "steps": steps}
        extra = [key for key, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"Rows of statistics contain their {' and '.join(extra)}; leave that out. To draw "
                "others, pass arrays: amax_history(amax, scale, fmt)."
            )
        drawn = _of_rows(amax, name)
    else:
        fmt = None if fmt is None else as_format(fmt)
        drawn = _of_arrays(amax, scale, fmt, steps, name)

    heading = drawn.title if ax is not None else ""
    ax = axes_for(ax, 7.0, 3.2, f"Amax of {drawn.title or 'a tensor'} over the steps")
    ax.set_yscale("log", base=2)
    x, n = drawn.steps, len(drawn.steps)
    positive = np.where(np.isfinite(drawn.amax) & (drawn.amax > 0), drawn.amax, np.nan)
    ax.plot(x, positive, color=BLUE, marker="o" if n <= 100 else "", ms=3.5, label="amax")
    if drawn.fmt is not None:
        limit = {"color": BLACK, "linestyle": (0, (4, 1.5)), "drawstyle": "steps-mid"}
        label = f"scale · {drawn.fmt.max:g}, limit of {drawn.fmt.name}"
        ax.plot(x, drawn.most, label=label, **limit)
        if np.any(drawn.least < drawn.most):
            band = {"color": BLACK, "alpha": 0.15, "linewidth": 0, "label": "in other blocks"}
            ax.fill_between(x, drawn.least, drawn.most, step="mid", **band)
    data, edge = ax.transData, ax.get_xaxis_transform()  # of the edge, heights are fractions
    low, high = np.full(n, 0.03), np.full(n, 0.97)
    saturates = f"saturates: {drawn.saturated.sum()} of {n} steps"
    for where, heights, transform, marker, colour, label in (
        (drawn.saturated, positive, data, "^", VERMILION, saturates),
        (drawn.amax == 0, low, edge, "v", AMBER, "amax is 0"),
        (drawn.nonfinite, high, edge, "X", BLACK, "holds NaN or Inf"),
    ):
        if where.any():
            mark = {"color": colour, "ms": 7, "zorder": 4, "clip_on": False, "label": label}
            ax.plot(x[where], heights[where], marker, transform=transform, **mark)
    ax.locator_params(axis="x", integer=True)
    ax.minorticks_off()
    _label_magnitudes(ax, np.concatenate([positive, drawn.least, drawn.most]))
    tidy(ax, "step", "magnitude")
    legend_above(ax, columns=3, title=heading)
    return ax


@dataclass(frozen=True)
class _History:
    """One tensor over `steps`; all arrays are of their length."""

    steps: np.ndarray
    amax: np.ndarray
    least: np.ndarray  # what the smallest and the largest scale can hold
    most: np.ndarray
    saturated: np.ndarray
    nonfinite: np.ndarray
    fmt: Format | None
    title: str = ""


def _label_magnitudes(ax: Axes, heights: np.ndarray) -> None:
    """Label numbers between powers of two as well, where `heights`, above 0, span few of these."""
    from matplotlib.ticker import LogLocator

    heights = heights[np.isfinite(heights)]
    if heights.size and np.ptp(np.log2(heights)) < 3:
        ax.yaxis.set_major_locator(LogLocator(2, (1, 1.25, 1.5, 1.75)))
        ax.yaxis.set_major_formatter("{x:.3g}")


def _of_rows(given: Any, name: str | None) -> _History:
    rows = _of_tensor(name, some_rows(given, "amax_history"))
    steps = steps_of(rows)
    latest = {row.step or 0: row for row in rows}
    rows = [latest[step] for step in steps]
    fmt = format_called(rows[0].format)
    return _History(
        steps=np.array(steps),
        amax=np.array([row.amax for row in rows]),
        least=np.array([row.scale_min for row in rows]) * fmt.max,
        most=np.array([row.scale_max for row in rows]) * fmt.max,
        saturated=np.array([row.overflow > 0 for row in rows]),
        nonfinite=np.array([row.nonfinite > 0 for row in rows]),
        fmt=fmt,
        title=rows[0].name,
    )


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


def _of_arrays(amax: Any, scale: Any, fmt: Format | None, steps: Any, name: str | None) -> _History:
    if name is not None:
        raise ValueError(
            f"name={name!r} chooses among rows of statistics, but amax is an array. Leave name out."
        )
    amax = np.asarray(amax, np.float64)
    if amax.ndim != 1 or not amax.size:
        raise ValueError(
            f"amax has the shape {amax.shape}, but must be one number for each step, f32[n] with "
            "at least one step. Or pass rows of statistics."
        )
    steps = np.arange(len(amax)) if steps is None else np.asarray(steps)
    if steps.shape != amax.shape:
        raise ValueError(f"amax has the shape {amax.shape}, but steps {steps.shape}.")
    nonfinite = ~np.isfinite(amax)
    if scale is None and fmt is None:
        none = np.zeros(len(amax), bool)
        return _History(steps, amax, np.zeros(0), np.zeros(0), none, nonfinite, None)
    if scale is None or fmt is None:
        raise ValueError(
            "scale and fmt belong together, because the limit is scale * fmt.max. Pass both: "
            "amax_history(amax, scale, jfp8.E4M3FN)."
        )
    scale = np.asarray(scale, np.float64)
    if scale.shape not in ((), amax.shape):
        raise ValueError(
            f"amax has the shape {amax.shape}, but scale {scale.shape}: it must be one number, or "
            "one for each step."
        )
    if np.any(scale <= 0):
        raise ValueError(
            "scale has elements that are not positive. It is the scale of x ~= data * scale."
        )
    most = np.broadcast_to(scale * fmt.max, amax.shape)
    saturated = saturates(amax / scale, fmt) & ~nonfinite
    return _History(steps, amax, most, most, saturated, nonfinite, fmt)
