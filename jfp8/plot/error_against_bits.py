"""`error_against_bits`: what each recipe loses of a tensor, and how many bits it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jfp8.plot.style import BLUE, GREY, axes_for, percent, tidy
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RECIPES, check_recipe
from jfp8.scaling.arrays import ScaledArray, scaled_values

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes


def error_against_bits(
    x: jax.typing.ArrayLike,
    quantizers: Mapping[str, Recipe | Quantizer | str] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """The error of a tensor under each recipe, against bits per element with those of scales. ::

        bits  = bits of the format + bits of all scales / elements
        error = sqrt(mean_j (sum_i (q(x) - x)_ij^2 / sum_i x_ij^2))        over tokens i, features j

    Features weigh the same, since a network may need a small one as much as one that is a thousand
    times larger. Of features of one size it is the relative RMS error. Down and left is better.

    Args:
      x: ``f32[..., features]``, activations: the left operand of a forward product, which sums over
        the last dimension.
      quantizers: recipes, names of recipes, or quantizers, by the names that the picture gives
        them. None: all recipes of jfp8, by their own. Of a recipe it is the quantizer of the left
        operand forward, without a history.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes. ``ax.lines[0]`` has a point for each different result; equal ones share it, and the
      texts beside say whose it is. The dashed line is bfloat16.

    Raises:
      ValueError: nothing to draw; `x` with fewer than two dimensions, or with zeros, NaN or Inf
        alone; an unknown name of a recipe, or one that leaves the operand in high precision.
      TypeError: something that is neither recipe nor quantizer.
      ImportError: matplotlib is missing.

    >>> import jax, jfp8
    >>> x = jax.random.normal(jax.random.key(0), (64, 256))
    >>> ax = jfp8.plot.error_against_bits(x, {"MX": "mxfp8", "4 bits": "nvfp4"})
    >>> ax.lines[0].get_xdata().round(2).tolist()
    [8.25, 4.5]
    """
    values = np.asarray(x, np.float32)
    if values.ndim < 2 or not np.isfinite(values).all() or not values.any():
        raise ValueError(
            f"x has the shape {values.shape}, and must be f32[..., features] of two dimensions or "
            "more, with finite elements that are not all zeros."
        )
    values = values.reshape(-1, values.shape[-1])
    if quantizers is None:
        quantizers = {recipe.name: recipe() for recipe in RECIPES}
    if not quantizers:
        raise ValueError('quantizers is empty. Name some, such as {"MX": "mxfp8"}; None is all.')

    groups: dict[tuple[float, float], list[str]] = {}
    for name, given in quantizers.items():
        q = _quantizer(name, given)(
            jnp.asarray(values),
            Context((1,), jnp.max(jnp.abs(values)), None, jnp.zeros(2, jnp.uint32)),
        )
        error = float(f"{_error(np.asarray(scaled_values(q)), values):.6g}")
        groups.setdefault((_bits(q) / values.size, error), []).append(name)
    bits, errors = np.array(list(groups)).T

    ax = axes_for(ax, 7.0, 3.4, "Error of a tensor, against bits per element")
    ax.set_yscale("log")
    ax.plot(bits, errors, "o", color=BLUE, ms=6, mec="white", zorder=3)
    in_bf16 = _error(np.asarray(values.astype(jnp.bfloat16), np.float32), values)
    ax.axhline(in_bf16, color=GREY, linestyle="--", linewidth=1)
    ax.text(0.01, in_bf16, f"bfloat16, 16 bits: {percent(in_bf16)}",
            transform=ax.get_yaxis_transform(), fontsize="small", va="bottom")  # fmt: skip
    drawn = [*errors[errors > 0], in_bf16]
    ax.set_ylim(min(drawn) / 1.6, max(drawn) * 1.6)
    _name_points(ax, groups)
    tidy(ax, "bits per element, with scales", "relative error of a feature, RMS")
    ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g} %")
    ax.minorticks_off()
    return ax


def _quantizer(name: str, given: Any) -> Quantizer:
    if isinstance(given, Quantizer):
        return given
    quantizer = check_recipe(given).resolved().fprop.lhs
    if quantizer is None:
        raise ValueError(
            f"{name!r}: {given!r} leaves the left operand of the forward product in high "
            "precision, so that there is nothing to draw."
        )
    return quantizer


def _bits(q: ScaledArray) -> int:
    """Of the data and all scales; four bits count as four, however they are stored."""
    data = q.size * q.format.bits
    if isinstance(q.scale, ScaledArray):
        return data + _bits(q.scale)
    return data + 8 * q.scale.size * q.scale.dtype.itemsize


def _error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """Relative error of the features, root mean square."""
    noise, signal = (np.sum(a.astype(np.float64) ** 2, 0) for a in (approximate - exact, exact))
    return math.sqrt(np.mean(noise[signal > 0] / signal[signal > 0]))


def _name_points(ax: Axes, groups: Mapping[tuple[float, float], list[str]]) -> None:
    """A text for each point at the right of the axes, with a line to it; no text covers another."""
    low, high = np.log(ax.get_ylim())
    points = sorted(groups, key=lambda point: (point[1], -point[0]))  # upwards
    heights = [(math.log(max(error, 1e-30)) - low) / (high - low) for _, error in points]
    apart = 0.17 * ax.figure.dpi / ax.get_window_extent().height  # 0.17 inches
    for _ in range(100):  # neighbours push each other away
        for i in range(len(points) - 1):
            push = max(apart - (heights[i + 1] - heights[i]), 0.0) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    to_point = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "relpos": (0, 0.5)}
    to_point |= {"shrinkA": 0, "shrinkB": 3}
    for point, height in zip(points, heights, strict=True):
        text = f"{', '.join(groups[point])}: {point[0]:.3g} bits, {percent(point[1])}"
        ax.annotate(text, point, (1.04, height), textcoords="axes fraction", va="center",
                    fontsize="small", arrowprops=to_point, annotation_clip=False)  # fmt: skip
