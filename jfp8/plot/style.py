"""Axes, colors and number formats of all pictures."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colors. In this order neighbors differ in lightness too.
BLUE, AMBER, BLACK, VERMILION, SKY, GREEN = _COLORS = (
    "#0072B2",
    "#E69F00",
    "#000000",
    "#D55E00",
    "#56B4E9",
    "#009E73",
)
GRAY = "#999999"

_DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
    (0, (2.5, 1)),
)


def line(i: int) -> dict[str, Any]:
    """Return color and style of the i-th line: six of either, 36 in all."""
    n = len(_COLORS)
    return {"color": _COLORS[i % n], "linestyle": _DASHES[(i + i // n) % n]}


TITLE_HEIGHT = 0.25  # inches


def axes_for(ax: Axes | None, width: float, height: float, title: str) -> Axes:
    """Return `ax`, or new axes of `width` x `height` inches in a figure with a title."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ImportError(
            "jfp8.plot draws with matplotlib, which is not installed: pip install 'jfp8[viz]'"
        ) from missing
    from jfp8.plot.picture import Picture

    figure = Figure((width, height + TITLE_HEIGHT), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure.add_subplot(axes_class=Picture)


def tidy(ax: Axes, x: str, y: str = "") -> None:
    """Label the axes; draw no frame above and to the right, and lines behind the data."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", alpha=0.3)


def legend_above(ax: Axes, title: str = "") -> None:
    """Draw the legend above the axes, where it hides no data."""
    ax.legend(
        title=title or None,
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        fontsize="small",
        borderaxespad=0.2,
        columnspacing=1.5,
    )


def percent(fraction: float) -> str:
    """Format as ``"12.3 %"``; small ones keep two digits, smaller ones become a bound."""
    value = 100 * fraction
    if value == 0:
        return "0 %"
    if value == 100:
        return "100 %"
    if value < 0.0001:
        return "< 0.0001 %"
    if value < 1:
        return f"{value:.2g} %" if value >= 0.001 else f"{value:.4f} %"
    return f"{value:.1f} %"


MAX_LABEL_LENGTH = 34


def shorten(labels: list[str]) -> list[str]:
    """Leave out the folder that all labels have in common, and the middle of long labels."""
    common = os.path.commonprefix(labels)
    common = common[: common.rfind("/") + 1] if len(labels) > 1 else ""
    short = []
    for label in labels:
        label = label[len(common) :]
        if len(label) > MAX_LABEL_LENGTH:
            keep = MAX_LABEL_LENGTH - 1
            label = f"{label[: keep // 3]}…{label[-(keep - keep // 3) :]}"
        short.append(label)
    return short
