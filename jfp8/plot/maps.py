"""What maps of layers share: names that fit beside them, and hatched squares."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.plot.style import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABEL_LENGTH = 34
NOTHING = ("no number", GREY, "xxxx")  # of squares without one: their label, colour and hatch


def shorten(labels: list[str]) -> list[str]:
    """Without the folder that all have in common, and with the middle of long ones left out."""
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


def hatch(ax: Axes, where: np.ndarray, label: str, colour: str, pattern: str) -> None:
    """Lines over the squares of the map that are true in `where`, if any."""
    from matplotlib.collections import PolyCollection

    squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for y, x in np.argwhere(where)]
    if squares:
        lines: dict[str, Any] = {"edgecolor": colour, "hatch": pattern, "linewidth": 0}
        ax.add_collection(PolyCollection(squares, facecolor="none", label=label, **lines))
