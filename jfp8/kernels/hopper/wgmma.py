"""Layouts of sums that wgmma keeps in registers, and their scales."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.shared_memory import along

BY_ELEMENT = plgpu.Layout.WGMMA
BY_ROW = BY_ELEMENT.reduce(1)  # layout of a vector that is broadcast along the rows of a tile
BY_COLUMN = BY_ELEMENT.reduce(0)


def slices(width: int, size: int) -> list[Any]:
    """Return slices of `size` columns, the number of which vectors are in registers at a time."""
    return [pl.ds(c, size) for c in range(0, width, size)]


def cut(x: jax.Array, parts: list[Any]) -> list[jax.Array]:
    """Return these slices of the columns of `x`."""
    return [x[:, part.start : part.start + part.size] for part in parts]


def scaled(parts: list[jax.Array], by_row: Any, by_part: list[jax.Array]) -> list[jax.Array]:
    """Return slices of a sum, times a scale of each row, and of each slice or each column in it.

    Without scales of rows, there are none.
    """
    if by_row is None:
        return parts
    shape = parts[0].shape
    if not by_part[0].ndim:
        return [y * along(by_row * s, shape, 0) for y, s in zip(parts, by_part, strict=True)]
    by_row = along(by_row, shape, 0)
    return [y * (by_row * along(s, shape, 1)) for y, s in zip(parts, by_part, strict=True)]
