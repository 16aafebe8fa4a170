"""`block_scales`: where in a matrix which scale applies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jfp8.plot.style import axes_for
from jfp8.scaling.arrays import ScaledArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def block_scales(q: ScaledArray, *, ax: Axes | None = None) -> Axes:
    """Draw a map of a matrix, coloured by ``log2(scale)`` of each of its blocks.

    Dark is a small scale, and so a block whose largest element is small. Blocks that a NaN or Inf
    made NaN are hatched, and so are scales of zero (of blocks that became zero).

    Args:
      q: a `ScaledArray` of two dimensions. Two-level scales are multiplied before they are drawn.
      ax: axes to draw on; None for new ones. A colour bar is put next to it.

    Returns:
      The axes. Element ``q[i, j]`` is the square with the corners ``(j, i)`` and ``(j+1, i+1)``;
      rows are counted downwards. ``ax.collections[0]`` holds ``log2(scale)``, one for each block.

    Raises:
      TypeError: `q` is not a `ScaledArray`.
      ValueError: it does not have two dimensions, or it has no elements.
      ImportError: matplotlib is missing.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(448 * jnp.eye(4), granularity=jfp8.Block((2, 2)))
    >>> jfp8.plot.block_scales(q).collections[0].get_array().data
    array([[0., 0.],
           [0., 0.]])
    """
    if not isinstance(q, ScaledArray):
        raise TypeError(
            f"block_scales takes a ScaledArray, got {type(q).__name__}. Make one: "
            "jfp8.quantize(x, granularity=jfp8.Block((1, 32)))."
        )
    if q.ndim != 2 or 0 in q.shape:
        raise ValueError(
            f"block_scales draws a matrix, but q has the shape {q.shape}. Quantize a matrix: "
            "jfp8.quantize(x.reshape(-1, x.shape[-1]), granularity=jfp8.Block((1, 32)))."
        )
    scale = _scales(q)
    block = q.block_sizes() if scale.ndim else q.shape
    scale = np.atleast_2d(scale)
    rows, columns = (
        np.minimum(np.arange(m + 1) * b, n)
        for m, b, n in zip(scale.shape, block, q.shape, strict=True)
    )
    positive = np.isfinite(scale) & (scale > 0)
    exponent = np.log2(np.where(positive, scale, 1.0))
    blocks = f"blocks of {rows[1]} × {columns[1]}"
    title = f"Scales of a matrix of {q.shape[0]} × {q.shape[1]}, in {blocks}"
    ax = axes_for(ax, 7.0, 3.6, title)
    masked = np.ma.masked_array(exponent, ~positive)
    mesh = ax.pcolormesh(columns, rows, masked, cmap="cividis", rasterized=True)
    if positive.all() and exponent.min() == exponent.max():
        mesh.set_clim(exponent.min() - 1, exponent.max() + 1)
    ax.patch.set(hatch="xxxx", edgecolor="0.4")  # shows where nothing is drawn
    ax.set_xlim(0, q.shape[1])
    ax.set_ylim(q.shape[0], 0)
    ax.set_xlabel(f"column ({blocks})")
    ax.set_ylabel("row")
    ax.locator_params(integer=True)
    ax.grid(visible=False)
    bar = ax.figure.colorbar(mesh, ax=ax, label="log2(scale)")
    bar.ax.locator_params(axis="y", integer=True)
    bar.outline.set_visible(False)
    return ax


def _scales(q: ScaledArray) -> np.ndarray:
    """Return f64 in the shape of the scales; for two levels, their product."""
    if isinstance(q.scale, ScaledArray):
        outer = np.asarray(q.scale.scale).astype(np.float64)
        return np.asarray(q.scale.data).astype(np.float64) * outer
    return np.asarray(q.scale).astype(np.float64)
