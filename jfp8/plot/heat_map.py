"""`heat_map`: one number of every layer, over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.debug.records import NUMBERS, TensorStats, some_rows, steps_of
from jfp8.plot.style import BLACK, GRAY, VERMILION, axes_for, legend_above, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 200
MAX_LABELS = 64

# Hatched cells: the name in the legend, color and pattern of the lines.
_DEAD = ("dead: all zeros", BLACK, "////")
_NONFINITE = ("NaN or Inf", VERMILION, r"\\\\")
_NOTHING = ("no number", GRAY, "xxxx")


@dataclass(frozen=True)
class _Shown:
    """Colors of a value: from light to dark, and logarithmic, unless a low one is bad."""

    label: str
    unit: str = ""
    factor: float = 1.0
    ends: tuple[float, float] | None = None  # ends of the colors; None means the range of the data
    low_is_bad: bool = False


_PERCENT = {"unit": "% of the elements", "factor": 100.0, "ends": (1e-3, 100.0)}
_SHOWN = {
    "underflow": _Shown("underflow", **_PERCENT),
    "overflow": _Shown("overflow", **_PERCENT),
    "nonfinite": _Shown("NaN or Inf", **_PERCENT),
    "sqnr": _Shown("SQNR", "dB", ends=(0.0, 40.0), low_is_bad=True),
    "headroom": _Shown("headroom", "bits", ends=(-2.0, 14.0), low_is_bad=True),
}


def heat_map(
    rows: Iterable[TensorStats],
    value: str = "underflow",
    tensor: str | None = "grad",
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw one number of every layer (downwards, in program order) over the steps.

    The colors of fractions, ``"sqnr"`` and ``"headroom"`` mean the same in every picture: from
    0.001 to 100 % on a logarithmic scale, from 0 to 40 dB, and from -2 to 14 bits. Dark is bad. A
    fraction of exactly zero is white, and one below 0.001 % is drawn as 0.001 %. Values beyond the
    ends of the scale, and Inf, have the color of the end.

    Hatched, with an entry in the legend, are

    * *dead: all zeros*: a tensor of nothing but zeros. None of it underflows, and no recipe helps:
      look at what computes it.
    * *NaN or Inf*: a tensor with an element that is not finite. Its number ignores this element.
    * *no number*: cells without a row, and NaN.

    With more than 200 steps every column shows the worst of several successive steps (the largest
    number; for SQNR and headroom the smallest), hatched if one of them is, and the axis says of how
    many.

    Args:
      rows: statistics of one or more steps. Of several rows for the same tensor and step the last
        counts, so that the file of a resumed run can be drawn as it is.
      value: a field of `TensorStats`: ``"underflow"``, ``"overflow"``, ``"nonfinite"``,
        ``"sqnr"``, ``"headroom"``, ``"amax"``, ``"rms"``, ``"mse"``, ``"scale_min"`` or
        ``"scale_max"``.
      tensor: ``"lhs"``, ``"rhs"``, ``"grad"`` or another that the rows have; None for all.
      ax: axes to draw on; None for new ones. A color bar is put next to it.

    Returns:
      The axes. ``ax.collections[0]`` holds the numbers, ``[layers, columns]``, in the unit of the
      color bar. The other collections are hatched, and labeled as in the legend.

    Raises:
      ValueError: no rows; a value or a tensor that they do not have; only some rows have a step.
      TypeError: something other than rows.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> from jfp8.debug.records import NUMBERS, TensorStats, some_rows, steps_of
    >>> def row(step, path, underflow):
    ...     numbers = dict.fromkeys(("amax", "scale_min", "scale_max", "rms", "sqnr"), 1.0)
    ...     numbers |= dict.fromkeys(("overflow", "nonfinite", "mse", "headroom"), 0.0)
    ...     return TensorStats(
    ...         step, path, (), "grad", "dgrad+wgrad", "delayed", "E5M2", order=0, count=8,
    ...         underflow=underflow, exponents={}, **numbers)
    >>> ax = jfp8.plot.heat_map([row(0, "a", 0.0), row(0, "b", 0.5), row(10, "b", 0.25)])
    >>> ax.collections[0].get_array().tolist()
    [[0.0, None], [50.0, 25.0]]
    """
    rows = some_rows(rows, "heat_map")
    if value not in NUMBERS:
        raise ValueError(f"value={value!r}: must be one of {', '.join(map(repr, NUMBERS))}.")
    tensors = dict.fromkeys(row.tensor for row in rows)
    if tensor is not None and tensor not in tensors:
        raise ValueError(
            f"tensor={tensor!r}: the rows describe {', '.join(map(repr, tensors))}. Choose one of "
            "them, or None for all."
        )
    rows = [row for row in rows if tensor in (None, row.tensor)]
    shown = _SHOWN.get(value, _Shown(value))
    labels, steps, table = _table(rows, tensor)
    merged = math.ceil(len(steps) / MAX_COLUMNS)
    steps = steps[::merged]
    columns = partial(_columns, table, merged)
    numbers = columns(lambda row: getattr(row, value) * shown.factor, shown.low_is_bad)
    marks = {
        _DEAD: columns(lambda row: row.amax == 0 and row.nonfinite == 0) > 0,
        _NONFINITE: columns(lambda row: row.nonfinite > 0 and value != "nonfinite") > 0,
        _NOTHING: np.isnan(numbers),
    }

    wanted = 3.2 + 0.07 * max(map(len, labels)) + 0.04 * len(steps)
    hatched = sum(where.any() for where in marks.values())
    wanted = max(wanted, 3.2 + 0.8 * hatched)  # room for the legend
    what = shown.label if tensor is None else f"{shown.label} of {tensor}"
    height = max(0.9 + 0.145 * min(len(labels), MAX_LABELS), 2.4)
    title = f"{what[0].upper()}{what[1:]}, by layer and step"
    ax = axes_for(ax, min(wanted, 7.0), height, title)
    _draw(ax, numbers, shown, what)
    for how, where in marks.items():
        _hatch(ax, where, *how)
    if len(ax.collections) > 1:
        legend_above(ax)
    _label_columns(ax, steps, merged)
    every = math.ceil(len(labels) / MAX_LABELS)
    size = 8 if len(labels) <= 32 else 6.5
    ax.set_yticks(np.arange(0, len(labels), every) + 0.5, labels[::every], fontsize=size)
    ax.set_ylim(len(labels), 0)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    return ax


def _table(
    rows: list[TensorStats], tensor: str | None
) -> tuple[list[str], list[int], list[list[TensorStats | None]]]:
    """Return labels of the layers, steps, and for each layer its row at each step, or None."""
    steps = list(steps_of(rows)) or [0]
    order = {row.name: row.order for row in reversed(rows)}
    labels = {row.name: row.name for row in rows}
    if tensor is not None:
        # "Dense_0 grad (dgrad)" -> "Dense_0 (dgrad)"
        labels = {row.name: row.layer + row.name[len(f"{row.layer} {tensor}") :] for row in rows}
    names = sorted(labels, key=lambda name: order[name])  # stable: equal ones as they came
    latest = {(row.name, row.step or 0): row for row in rows}
    table = [[latest.get((name, step)) for step in steps] for name in names]
    return shorten([labels[name] for name in names]), steps, table


def _columns(
    table: Any, merged: int, of_row: Callable[[TensorStats], float], low_is_bad: bool = False
) -> np.ndarray:
    """Return f64[layers, columns], the worst of every `merged` steps; NaN without rows."""
    numbers = [[math.nan if row is None else of_row(row) for row in line] for line in table]
    starts = np.arange(0, len(table[0]), merged)
    return (np.fmin if low_is_bad else np.fmax).reduceat(np.array(numbers, float), starts, axis=1)


def _draw(ax: Axes, numbers: np.ndarray, shown: _Shown, label: str) -> None:
    import matplotlib
    from matplotlib.colors import ListedColormap, Normalize, SymLogNorm

    blues = matplotlib.colormaps["Blues"](np.linspace(0.15, 1.0, 256))  # none as light as white
    colors: Any = ListedColormap(blues[::-1] if shown.low_is_bad else blues)
    low, high = shown.ends or _decades(numbers)
    if shown.low_is_bad:
        unit, norm, ticks = shown.unit, Normalize(low, high), np.linspace(low, high, 5).tolist()
        below, above = bool((numbers < low).any()), bool((numbers > high).any())
        extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]
    else:
        unit, extend = ", ".join(filter(None, [shown.unit, "white: 0"])), "neither"
        # Not LogNorm, to which zero is what no row says. What is not zero has a color.
        norm = SymLogNorm(low, vmin=low, vmax=high, base=10)
        numbers = np.where((numbers > 0) & (numbers < low), low, numbers)
        colors = colors.with_extremes(under="white")
        first, last = round(math.log10(low)), round(math.log10(high))
        ticks = [10.0**e for e in range(first, last + 1, math.ceil((last - first) / 8))]

    # pcolormesh leaves out what is not finite, which only NaN shall be.
    numbers = np.where(np.isinf(numbers), np.where(numbers > 0, high, low), numbers)
    masked = np.ma.masked_array(numbers, np.isnan(numbers))
    mesh = ax.pcolormesh(masked, cmap=colors, norm=norm, rasterized=True)
    bar = ax.figure.colorbar(mesh, ax=ax, extend=extend, aspect=25)
    gap = " " if len(unit) <= 10 else "\n"  # A longer label is longer than a low map is high.
    bar.set_label(f"{label}{gap}({unit})", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_linewidth(0.5)
    bar.minorticks_off()
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])


def _hatch(ax: Axes, where: np.ndarray, label: str, color: str, pattern: str) -> None:
    """Draw lines over the squares of the map that are true in `where`, if any."""
    from matplotlib.collections import PolyCollection

    squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for y, x in np.argwhere(where)]
    if squares:
        lines: dict[str, Any] = {"edgecolor": color, "hatch": pattern, "linewidth": 0}
        ax.add_collection(PolyCollection(squares, facecolor="none", label=label, **lines))


def _decades(numbers: np.ndarray) -> tuple[float, float]:
    """Return the whole powers of ten around the positive, finite numbers."""
    positive = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not positive.size:
        return 0.1, 1.0
    low, high = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _label_columns(ax: Axes, steps: list[int], merged: int) -> None:
    """Label every 1st, 2nd, 5th, 10th, ... column with its step, as room allows."""
    room = max(30 // len(str(steps[-1])), 2)
    every = next(k for k in _ROUND if len(steps) <= room * k)
    columns = np.arange(0, len(steps), every)
    ax.set_xticks(columns + 0.5, [str(steps[column]) for column in columns], fontsize=8)
    ax.set_xlabel("step" if merged == 1 else f"step (a column: the worst of {merged})")


_ROUND = (1, 2, 5, 10, 20, 50, 100)  # up to MAX_COLUMNS
