"""`number_line`: every value that a format has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jfp8.plot.style import BLUE, axes_for, tidy
from jfp8.scaling.formats import Format, FormatLike, as_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def number_line(*formats: FormatLike, limit: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw all values of `formats`, a row of strokes each; subnormals are half as high.

    Args:
      *formats: such as ``jfp8.E4M3FN``.
      limit: draw the values from ``-limit`` to ``limit``, on a linear axis. None draws all positive
        values, on a logarithmic axis.
      ax: axes to draw on; None for new ones.

    Returns:
      The axes. Format ``i`` is row ``i`` from the top, centred at ``y = i``.

    Raises:
      ValueError: no format, or a limit that is not positive.
      TypeError: something other than a format.
      ImportError: matplotlib is missing.

    >>> import jfp8
    >>> ax = jfp8.plot.number_line(jfp8.E4M3FN, jfp8.E5M2)
    >>> [label.get_text() for label in ax.get_yticklabels()], ax.get_xscale()
    (['E4M3FN', 'E5M2'], 'log')
    """
    if not formats:
        raise ValueError(
            "number_line draws the values of formats, but got none. Pass some: "
            "jfp8.plot.number_line(jfp8.E4M3FN, jfp8.E5M2)."
        )
    drawn = [as_format(fmt, "a format of number_line") for fmt in formats]
    if limit is not None and not limit > 0:
        raise ValueError(
            f"limit={limit!r}: must be a positive number, the end of a linear axis from -limit to "
            "limit; or None for a logarithmic axis."
        )
    names = ", ".join(fmt.name for fmt in drawn)
    title = f"Positive values of {names}"
    if limit is not None:
        title = f"Values of {names} from {-limit:g} to {limit:g}"
    ax = axes_for(ax, 7.0, 0.9 + 0.55 * len(drawn), title)
    for row, fmt in enumerate(drawn):
        values = positive_values(fmt)
        # E8M0FNU, without sign and zero, has no subnormals.
        half = np.where(fmt.signed & (values < fmt.smallest_normal), 0.19, 0.38)
        if limit is not None:
            if fmt.signed:
                values = np.concatenate([-values[::-1], [0.0], values])
                half = np.concatenate([half[::-1], [0.38], half])
            inside = np.abs(values) <= limit
            values, half = values[inside], half[inside]
        ax.vlines(values, row - half, row + half, color=BLUE, linewidth=1)
    if limit is None:
        ax.set_xscale("log", base=2)
        axis = "positive values (logarithmic axis)"
    else:
        ax.set_xlim(-1.03 * limit, 1.03 * limit)
        axis = f"values from {-limit:g} to {limit:g} (linear axis)"
    ax.set_yticks(range(len(drawn)), [fmt.name for fmt in drawn])
    ax.set_ylim(len(drawn) - 0.5, -0.5)
    ax.minorticks_off()
    tidy(ax, axis)
    ax.grid(visible=False)
    return ax


def positive_values(fmt: Format) -> np.ndarray:
    """Return f64[n], all finite positive values of `fmt` in increasing order."""
    codes = np.arange(fmt.max_code + 1)
    if not fmt.signed:
        return np.ldexp(1.0, codes - fmt.bias)
    exponent, mantissa = codes >> fmt.mantissa_bits, codes % (1 << fmt.mantissa_bits)
    hidden = (exponent > 0).astype(np.float64)
    fraction = hidden + mantissa / (1 << fmt.mantissa_bits)
    return np.ldexp(fraction, np.maximum(exponent, 1) - fmt.bias)[1:]
