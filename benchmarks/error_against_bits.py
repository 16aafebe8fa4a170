"""Draw the error of a tensor under every recipe, against the bits that the recipe keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jfp8.plot.style import BLUE, GRAY, percent, tidy
from jfp8.quantizers.quantizer import Context
from jfp8.recipes.registry import RECIPES
from jfp8.scaling.arrays import ScaledArray, scaled_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def error_against_bits(ax: Axes, x: np.ndarray) -> dict[str, float]:
    """Draw the error of a tensor under each recipe, against bits per element, scales included. ::

        bits  = bits of the format + bits of all scales / elements
        error = sqrt(mean_j (sum_i (q(x) - x)_ij^2 / sum_i x_ij^2))        over tokens i, features j

    Features weigh the same, since a network may need a small one as much as one that is a thousand
    times larger. Down and left is better.

    Args:
      ax: axes to draw on. ``ax.lines[0]`` has a point for each different result; equal ones share
        it, and the texts next to them give their names. The dashed line is bfloat16.
      x: ``f32[tokens, features]``, finite activations: the left operand of a forward matmul, to
        which each recipe applies its quantizer, without a history.

    Returns:
      The error under each recipe that quantizes activations, by name.
    """
    groups: dict[tuple[float, float], list[str]] = {}
    context = Context((1,), jnp.max(jnp.abs(x)), None, jnp.zeros(2, jnp.uint32))
    for recipe in RECIPES:
        quantizer = recipe().resolved().fprop.lhs
        if quantizer is None:  # activations stay in high precision
            continue
        q = quantizer(jnp.asarray(x), context)
        error = float(f"{_error(np.asarray(scaled_values(q)), x):.6g}")
        groups.setdefault((_bits(q) / x.size, error), []).append(recipe.name)
    bits, errors = np.array(list(groups)).T

    ax.set_yscale("log")
    ax.plot(bits, errors, "o", color=BLUE, ms=6, mec="white", zorder=3)
    in_bf16 = _error(np.asarray(x.astype(jnp.bfloat16), np.float32), x)
    ax.axhline(in_bf16, color=GRAY, linestyle="--", linewidth=1)
    ax.text(0.01, in_bf16, f"bfloat16, 16 bits: {percent(in_bf16)}",
            transform=ax.get_yaxis_transform(), fontsize="small", va="bottom")  # fmt: skip
    drawn = [*errors[errors > 0], in_bf16]
    ax.set_ylim(min(drawn) / 1.6, max(drawn) * 1.6)
    _name_points(ax, groups)
    tidy(ax, "bits per element, with scales", "relative error of a feature, RMS")
    ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g} %")
    ax.minorticks_off()
    return {name: error for (_, error), names in groups.items() for name in names}


def _bits(q: ScaledArray) -> int:
    """Return bits of the data and all scales; 4-bit values count as 4 in any storage."""
    data = q.size * q.format.bits
    if isinstance(q.scale, ScaledArray):
        return data + _bits(q.scale)
    return data + 8 * q.scale.size * q.scale.dtype.itemsize


def _error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """Return the relative error of the features, root mean square."""
    noise, signal = (np.sum(a.astype(np.float64) ** 2, 0) for a in (approximate - exact, exact))
    return math.sqrt(np.mean(noise[signal > 0] / signal[signal > 0]))


def _name_points(ax: Axes, groups: Mapping[tuple[float, float], list[str]]) -> None:
    """Write a text per point at the right of the axes, with a line to it, without overlaps."""
    low, high = np.log(ax.get_ylim())
    points = sorted(groups, key=lambda point: (point[1], -point[0]))  # upwards
    heights = [(math.log(max(error, 1e-30)) - low) / (high - low) for _, error in points]
    apart = 0.17 * ax.figure.dpi / ax.get_window_extent().height  # 0.17 inches
    for _ in range(100):  # neighbors push each other away
        for i in range(len(points) - 1):
            push = max(apart - (heights[i + 1] - heights[i]), 0.0) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    to_point = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.8, "relpos": (0, 0.5)}
    to_point |= {"shrinkA": 0, "shrinkB": 3}
    for point, height in zip(points, heights, strict=True):
        text = f"{', '.join(groups[point])}: {point[0]:.3g} bits, {percent(point[1])}"
        ax.annotate(text, point, (1.04, height), textcoords="axes fraction", va="center",
                    fontsize="small", arrowprops=to_point, annotation_clip=False)  # fmt: skip
