"""Draw the core: the files that one gradient of `scaled_dot_general` enters, in reading order."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from jfp8.plot.style import AMBER, BLUE, GRAY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.weight import entered, gradient_of_a_product

# Folders in the order of the data's way, and files in the order in which to read them. Both are
# checked against what is entered.
ORDER = {
    "tracing": ["device"],
    "scaling": ["formats", "codes", "arrays", "scales"],
    "quantizers": ["quantizer"],
    "recipes": ["product", "recipe", "per_tensor"],
    "matmul": ["spec", "planner"],
    "products": ["operation", "differentiated", "vjp", "dot_general"],
}


def _box(ax: Axes, x: float, y: float, width: float, text: str, color: str, **how: float) -> None:
    style = "round,pad=0,rounding_size=0.06"
    box = FancyBboxPatch((x, y), width, 0.5, boxstyle=style, fc="white", ec=color, lw=1.4)
    ax.add_patch(box)
    ax.text(x + width / 2, y + 0.25, text, ha="center", va="center", fontsize=8, color="black")


def draw() -> Figure:
    """Draw a column of files for each folder, and the door to the kernels below them.

    Raises:
      ValueError: `ORDER` does not name the files that are entered.
    """
    listed = sorted(f"{room}/{name}.py" for room, names in ORDER.items() for name in names)
    found = list(entered(gradient_of_a_product).paths)
    if listed != found:
        raise ValueError(f"A gradient enters {found}, but the picture lists {listed}.")
    figure = Figure((7.0, 3.6), layout="constrained")
    figure.suptitle(
        "The core of jfp8, from left to right and from top to bottom", fontsize="medium"
    )
    ax = figure.subplots()
    width, step = 1.28, 1.5
    for column, (room, names) in enumerate(ORDER.items()):
        x = column * step
        ax.text(x + width / 2, 4.55, f"{room}/", ha="center", fontsize=8, color=GRAY)
        for row, name in enumerate(names):
            _box(ax, x, 3.85 - 0.62 * row, width, f"{name}.py", BLUE)
        if column:
            ax.annotate("", (x - 0.02, 4.1), (x - 0.2, 4.1), arrowprops={"arrowstyle": "->"})
    end = (len(ORDER) - 1) * step + width
    _box(ax, 0, 0.55, end, "kernels/: imported when a program is traced for a chip", AMBER)
    door = list(ORDER).index("matmul") * step + width / 2
    arrow = {"arrowstyle": "->", "color": AMBER, "linestyle": "--"}
    ax.annotate("", (door, 1.07), (door, 3.2), arrowprops=arrow)
    ax.text(door - 0.06, 1.75, "planner_of, the door", ha="right", fontsize=8, color=GRAY)
    ax.set_xlim(-0.1, end + 0.1)
    ax.set_ylim(0.4, 4.8)
    ax.axis("off")
    return figure
