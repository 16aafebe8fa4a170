"""`Dot`: ``dot_general`` of quantized operands, and the three products that belong to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels import choice
from jfp8.kernels.choice import Implementation
from jfp8.matmul.spec import Job, Numbers, layout_of, multiply, plus_bias
from jfp8.products.operation import Kind, Operand, Operation, Sums
from jfp8.scaling.arrays import ScaledArray, scaled_values


@jax.tree_util.register_static
@dataclass(frozen=True)
class Dot(Operation):
    """``dot_general`` of operands with these shapes.

    Attributes:
      shapes, dtypes: see `Operation`.
      dimension_numbers: checked.
      implementation: see `scaled_matmul`.
    """

    dimension_numbers: Numbers
    implementation: Implementation

    def _product(self, kind: Kind) -> _DotProduct:
        return _three_products(self.shapes, self.dimension_numbers)[kind]

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._product(kind).numbers[0]

    def terms(self, kind: Kind) -> int:
        return self._product(kind).terms

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        numbers, order, _ = self._product(kind)
        y = multiply_operands(
            first, second, numbers, self.dtype_of(kind), sums, self.implementation
        )
        return y if order is None else y.transpose(order)


def multiply_operands(
    lhs: Operand,
    rhs: Operand,
    numbers: Numbers,
    dtype: np.dtype,
    sums: Sums,
    implementation: Implementation,
) -> jax.Array:
    """``dot_general`` of operands that may be quantized or not, in `dtype`."""
    job = Job(numbers, dtype, *sums)
    if isinstance(lhs, ScaledArray) and isinstance(rhs, ScaledArray):
        return choice.product(lhs, rhs, job, implementation)
    precision = None
    if isinstance(lhs, ScaledArray):
        lhs, precision = scaled_values(lhs), lax.Precision.HIGHEST
    if isinstance(rhs, ScaledArray):
        rhs, precision = scaled_values(rhs), lax.Precision.HIGHEST
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.astype(common), rhs.astype(common)
    y = multiply(lhs, rhs, numbers, precision, job.dtype_of_parts).astype(dtype)
    return plus_bias(y, job.bias)


class _DotProduct(NamedTuple):
    """One of the three products.

    Attributes:
      numbers: its dimension numbers.
      order: the transposition after it, if there is one.
      terms: the number of products that each element of the result sums.
    """

    numbers: Numbers
    order: tuple[int, ...] | None
    terms: int


@functools.lru_cache(maxsize=4096)
def _three_products(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> dict[Kind, _DotProduct]:
    """fprop, dgrad and wgrad.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    layout = layout_of(*shapes, numbers)
    m, n, k = layout.sizes
    lhs_free, rhs_free = layout.lhs_free, layout.rhs_free
    n_batch, n_lhs = len(lhs_batch), len(lhs_free)
    y_dims = tuple(range(len(layout.shape)))
    y_batch, y_lhs, y_rhs = y_dims[:n_batch], y_dims[n_batch:][:n_lhs], y_dims[n_batch + n_lhs :]

    # dgrad contracts what is free in rhs and gives: batch, lhs free, rhs contracting in rhs' order.
    # wgrad contracts what is free in lhs and gives: batch, lhs contracting in lhs' order, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    d_lhs_order = tuple(np.argsort(d_lhs_dims).tolist())
    d_rhs_order = tuple(np.argsort(d_rhs_dims).tolist())
    return {
        "fprop": _DotProduct(numbers, None, k),
        "dgrad": _DotProduct(((y_rhs, rhs_free), (y_batch, rhs_batch)), d_lhs_order, n),
        "wgrad": _DotProduct(((lhs_free, y_lhs), (lhs_batch, y_batch)), d_rhs_order, m),
    }
