"""`histogram`: the magnitudes of a tensor over the range of a format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jfp8.debug.records import TensorStats
from jfp8.plot.style import (
    AMBER,
    BLUE,
    GRAY,
    VERMILION,
    axes_for,
    legend_above,
    percent,
    shorten,
    tidy,
)
from jfp8.scaling.casts import check_cast_arguments
from jfp8.scaling.codes import as_float_array
from jfp8.scaling.formats import Format, FormatLike, as_format, format_called

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes

SMALLEST_EXPONENT = -127  # counts all f32 subnormals, see TensorStats.exponents


def histogram(
    x: jax.typing.ArrayLike | TensorStats,
    fmt: FormatLike | None = None,
    scale: float | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw a histogram of magnitudes, and the magnitudes that a format loses.

    A bar for every power of two, ``2^e <= |x| < 2^(e+1)``. Hatched on the left are magnitudes that
    become zero, ``|x| <= scale * fmt.smallest_subnormal / 2`` (underflow); hatched on the right are
    those that saturate, too large to round to ``scale * fmt.max`` (overflow). Gray are those that
    become subnormal numbers and lose some of their bits. If each block of a tensor has its own
    scale, magnitudes that only some blocks lose are hatched more lightly. The dotted line is the
    largest magnitude, whose bar may be too low to be seen.

    The percentages in the legend are exact shares of all elements. The bars of an array count all
    elements too; fractions of a row leave out zeros, as the row does.

    Args:
      x: ``f32 | bf16 | f16`` array of any shape; or a row of statistics, which contains its format
        and its scales.
      fmt: format of the data; None draws the magnitudes alone.
      scale: positive number, ``x ~= data * scale``. None takes ``amax / fmt.max``, as
        `jfp8.quantize` does.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes; its x axis is logarithmic. ``ax.set_yscale("log")`` makes single outliers visible.

    Raises:
      ValueError: an array without elements; a scale without a format, or one that is not positive
        and finite; `fmt` or `scale` together with a row.
      TypeError: `x` is neither a real floating array nor a row; `fmt` is not a format with a sign.
      ImportError: matplotlib is missing.

    >>> import jax.numpy as jnp, jfp8
    >>> x = jnp.array([0.0, 1e-6, 1.0, 1.5, 3.0, 448.0, 1000.0, 2000.0])
    >>> ax = jfp8.plot.histogram(x, jfp8.E4M3FN, scale=1.0)
    >>> [text.get_text() for text in ax.get_legend().get_texts()][:2]
    ['amax', 'underflow, becomes 0: 12.5 %']
    """
    if isinstance(x, TensorStats):
        if fmt is not None or scale is not None:
            raise ValueError(
                "A row of statistics contains its format and its scales, on which its percentages "
                "depend. Leave fmt and scale out, or draw the array: histogram(x, fmt, scale)."
            )
        drawn = _of_row(x)
    else:
        drawn = _of_array(x, None if fmt is None else as_format(fmt), scale)

    ax = axes_for(ax, 7.0, 3.2, drawn.title())
    ax.set_xscale("log", base=2)
    exponents = np.array(sorted(drawn.shares), np.int64)
    left = np.ldexp(1.0, exponents)
    shares = [100 * drawn.shares[e] for e in exponents.tolist()]
    ax.bar(left, shares, width=left, align="edge", color=BLUE, edgecolor="white", linewidth=0.5)
    ends = [left.min(), 2 * left.max()] if len(left) else []
    if drawn.amax > 0:
        ax.axvline(drawn.amax, color="black", linestyle=(0, (1, 1.2)), label="amax")
        ends.append(drawn.amax)
    if drawn.scales is not None:
        assert drawn.fmt is not None
        ends += _shade(ax, drawn, drawn.fmt, drawn.scales, ends)
    elif not ends:
        ends = [2.0**-8, 1.0]  # nothing but zeros: an axis, to say so
    ax.set_xlim(min(ends) / 2, max(ends) * 2)
    ax.set_ylim(0, ax.get_ylim()[1] if shares else 1)
    for share, mark, what in ((drawn.zeros, "$0$", "zeros"), (drawn.nonfinite, "x", "NaN or Inf")):
        if share:
            ax.plot([], [], " ", marker=mark, color="0.3", label=f"{what}: {percent(share)}")
    ax.minorticks_off()
    tidy(ax, "magnitude, one bar for each power of two", drawn.unit)
    if ax.get_legend_handles_labels()[0]:
        legend_above(ax)
    return ax


@dataclass(frozen=True)
class _Magnitudes:
    """Data to draw, of an array or a row; all shares are fractions."""

    shares: Mapping[int, float]
    unit: str
    zeros: float
    nonfinite: float
    amax: float
    underflow: float = 0.0
    overflow: float = 0.0
    fmt: Format | None = None
    scales: tuple[float, float] | None = None  # the smallest and the largest
    name: str = "A tensor"

    def title(self) -> str:
        if self.fmt is None or self.scales is None:
            return "Magnitudes of a tensor"
        low, high = self.scales
        scale = f"scale {low:.3g}" if low == high else f"scales {low:.3g} to {high:.3g}"
        under, over = percent(self.underflow), percent(self.overflow)
        lost = f"{under} becomes 0, {over} saturates"
        return f"{self.name} in {self.fmt.name}, {scale}: {lost}"


def _of_row(row: TensorStats) -> _Magnitudes:
    counted = max(sum(row.exponents.values()), 1)
    return _Magnitudes(
        shares={e: n / counted for e, n in row.exponents.items()},
        unit="share of the elements\nthat are not zero (%)",
        zeros=0.0,  # a row does not say
        nonfinite=row.nonfinite,
        amax=row.amax,
        underflow=row.underflow,
        overflow=row.overflow,
        fmt=format_called(row.format),
        scales=(row.scale_min, row.scale_max),
        name=shorten([row.name])[0],
    )


def _of_array(x: jax.typing.ArrayLike, fmt: Format | None, scale: float | None) -> _Magnitudes:
    magnitude = np.abs(np.asarray(as_float_array(x, "x")).astype(np.float32))
    if not magnitude.size:
        raise ValueError(f"x has no elements to draw: its shape is {magnitude.shape}.")
    finite = np.isfinite(magnitude)
    nonzero = magnitude[finite & (magnitude > 0)]
    exponents = np.maximum(np.frexp(nonzero)[1] - 1, SMALLEST_EXPONENT)
    share = lambda where: np.count_nonzero(where) / magnitude.size
    drawn = _Magnitudes(
        shares={int(e): share(exponents == e) for e in np.unique(exponents)},
        unit="share of the elements (%)",
        zeros=share(magnitude == 0),
        nonfinite=share(~finite),
        amax=float(nonzero.max(initial=0.0)),
    )
    if fmt is None:
        if scale is None:
            return drawn
        raise ValueError(
            f"scale={scale!r} needs a format, into whose range it moves the tensor. "
            f"Pass it: histogram(x, jfp8.E4M3FN, scale={scale!r})."
        )
    check_cast_arguments(x, "nearest_even", None)
    if not fmt.signed:
        raise TypeError(
            f"{fmt.name} has no sign and no zero: it holds scales, not data. Pass a format of "
            "data, such as jfp8.E4M3FN."
        )
    if scale is None:
        scale = drawn.amax / fmt.max or 1.0
    scale = float(scale)
    if not 0 < scale < np.inf:
        raise ValueError(
            f"scale={scale!r}: must be a positive, finite number, as in x ~= data * scale. None "
            "takes amax / fmt.max."
        )
    data = nonzero.astype(np.float64) / scale
    return dataclasses.replace(
        drawn,
        underflow=share(data <= halfway_to_zero(fmt)),
        overflow=share(saturates(data, fmt)),
        fmt=fmt,
        scales=(scale, scale),
    )


def _shade(
    ax: Axes, drawn: _Magnitudes, fmt: Format, scales: tuple[float, float], ends: list[float]
) -> list[float]:
    """Hatch what is lost; returns how far the axis has to reach."""
    low, high = scales
    zero, subnormal, most = halfway_to_zero(fmt), fmt.smallest_normal, halfway_above_max(fmt)
    first = min([*ends, low * zero / 4]) / 2
    last = max([*ends, high * most * 4]) * 2
    under, over = percent(drawn.underflow), percent(drawn.overflow)

    def hatched(left: float, right: float, color: str, hatch: str, **how: Any) -> None:
        lines: dict[str, Any] = {"edgecolor": color, "hatch": hatch, "linewidth": 0.0, "zorder": 3}
        ax.axvspan(left, right, facecolor="none", **lines, **how)

    hatched(first, low * zero, AMBER, "\\\\\\", label=f"underflow, becomes 0: {under}")
    hatched(high * most, last, VERMILION, "///", label=f"overflow, saturates: {over}")
    gray: dict[str, Any] = {"color": GRAY, "alpha": 0.25, "linewidth": 0, "zorder": 0.5}
    ax.axvspan(high * zero, high * subnormal, label="subnormal, fewer bits", **gray)
    if low < high:
        hatched(low * zero, high * zero, AMBER, "\\", label="in some blocks", alpha=0.45)
        hatched(low * most, high * most, VERMILION, "/", alpha=0.45)
    for edge, color in ((low * zero, AMBER), (high * most, VERMILION)):
        ax.axvline(edge, color=color, linewidth=1.5)
    return [low * zero / 2, high * most * 2]


def halfway_to_zero(fmt: Format) -> float:
    """Return half of the smallest value, which rounds to zero, since zero is even."""
    return fmt.smallest_subnormal / 2


def halfway_above_max(fmt: Format) -> float:
    """Return the middle of the largest value and of its successor if it had one."""
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def saturates(data: np.ndarray, fmt: Format) -> np.ndarray:
    """Decide if `data`, not negative, is too large to round to ``fmt.max``."""
    tie = halfway_above_max(fmt)
    # The tie itself goes to the even one of both codes.
    return data > tie if fmt.max_code % 2 == 0 else data >= tie
