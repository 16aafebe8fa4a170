"""Convert operands of a ``dot_general`` to the matrices that kernels multiply, and results back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.matmul.as_matrices import matrix_groups
from jfp8.matmul.spec import Numbers, layout_of
from jfp8.scaling.arrays import ScaledArray


@dataclass(frozen=True)
class Arrangement:
    """Convert an array to a matrix: pad, transpose, reshape, transpose again, and pad."""

    shape: tuple[int, ...]  # of the array, with zeros after its values
    order: tuple[int, ...]  # of its dimensions, before they are merged
    sizes: tuple[int, ...]  # of the merged dimensions
    swapped: bool = False  # True if the last two of these are exchanged
    padded: tuple[int, int] | None = None  # with zeros after the values; None if unpadded
    values: tuple[int, ...] | None = None  # the shape of the array without zeros; None: the same

    def matrix(self, x: Any) -> Any:
        """Return an array, or a `ScaledArray`, as the matrix."""
        x = _padded(x, self.shape)
        if self.order != tuple(range(len(self.shape))):
            x = x.transpose(*self.order)
        x = x if x.shape == self.sizes else x.reshape(*self.sizes)
        x = x.T if self.swapped else x
        return x if self.padded is None else _padded(x, self.padded)

    def array(self, y: jax.Array) -> jax.Array:
        """Return a matrix, or one whose rows are not merged yet, as the array."""
        if self.padded is not None:
            rows, columns = self.sizes[::-1] if self.swapped else self.sizes
            y = y.reshape(self.padded)[:rows, :columns]
        y = y.T if self.swapped else y
        y = y.reshape([self.shape[d] for d in self.order])
        y, values = y.transpose(np.argsort(self.order).tolist()), self.values or self.shape
        return y if values == y.shape else y[tuple(map(slice, values))]


def _padded(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape or isinstance(x, ScaledArray):
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])


def arrangements(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> dict[str, Arrangement]:
    """Return the arrangements of lhs, rhs and grad (or y) as matrices, or batches of them."""
    (lc, rc), (lb, rb) = numbers
    layout = layout_of(*shapes, numbers)
    m, n, _ = layout.sizes
    found = {}
    for role, shape, *groups in (
        ("lhs", shapes[0], lb, layout.lhs_free, lc),
        ("rhs", shapes[1], rb, layout.rhs_free, rc),
    ):
        merged = matrix_groups(*groups)
        order = tuple(d for group in merged for d in group)
        sizes = tuple(math.prod(shape[d] for d in group) for group in merged)
        found[role] = Arrangement(shape, order, sizes)
    batch = (math.prod(layout.shape[: len(lb)]),) if lb else ()
    order = tuple(range(len(layout.shape)))
    found["grad"] = Arrangement(layout.shape, order, (*batch, m, n))
    return found
