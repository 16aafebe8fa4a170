"""`Dot`: the three products of ``dot_general``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.choice import Implementation
from jfp8.matmul.dimensions import free_dims
from jfp8.matmul.job import multiply
from jfp8.matmul.scaled_matmul import scaled_matmul
from jfp8.products.operation import Kind, Operand, Operation
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray, scaled_values


@dataclass(frozen=True)
class Dot(Operation):
    """``dot_general`` of operands with these shapes.

    Attributes:
      dimension_numbers: checked.
      shapes: of lhs and rhs.
      dtypes: of lhs, rhs and y.
      implementation: see `scaled_matmul`.
    """

    dimension_numbers: lax.DotDimensionNumbers
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]
    implementation: Implementation

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers, _, _ = self._numbers(kind)
        first, second = numbers[0]
        return tuple(first), tuple(second)

    def terms(self, kind: Kind) -> int:
        lhs, rhs = self.shapes
        summed = {
            "fprop": [lhs[d] for d in self.contracting("fprop")[0]],
            "dgrad": [rhs[d] for d in self.contracting("dgrad")[1]],
            "wgrad": [lhs[d] for d in self.contracting("wgrad")[0]],
        }
        return math.prod(summed[kind])

    def multiply(
        self,
        kind: Kind,
        first: Operand,
        second: Operand,
        how: Product,
        accumulation: str,
        extra: tuple[jax.Array, ...],
    ) -> jax.Array:
        del extra
        numbers, order, dtype = self._numbers(kind)
        y = self.product(first, second, numbers, dtype, how, accumulation)
        return y if order is None else y.transpose(order)

    def _numbers(
        self, kind: Kind
    ) -> tuple[lax.DotDimensionNumbers, tuple[int, ...] | None, np.dtype]:
        """Dimension numbers, the transposition that follows, and the dtype of one product."""
        lhs_dtype, rhs_dtype, y_dtype = self.dtypes
        if kind == "fprop":
            return self.dimension_numbers, None, y_dtype
        dgrad, d_lhs, wgrad, d_rhs = _transposed_products(
            len(self.shapes[0]), len(self.shapes[1]), self.dimension_numbers
        )
        return (dgrad, d_lhs, lhs_dtype) if kind == "dgrad" else (wgrad, d_rhs, rhs_dtype)

    def product(
        self,
        lhs: Operand,
        rhs: Operand,
        dimension_numbers: lax.DotDimensionNumbers,
        dtype: np.dtype,
        how: Product,
        accumulation: str,
    ) -> jax.Array:
        """One product, as `how` says, of operands that may be quantized or not."""
        if isinstance(lhs, ScaledArray) and isinstance(rhs, ScaledArray):
            return scaled_matmul(
                lhs,
                rhs,
                dimension_numbers,
                preferred_element_type=dtype,
                accumulation=accumulation,
                fast_accumulation=how.fast_accumulation,
                powers_of_two=how.powers_of_two,
                implementation=self.implementation,
            )
        precision = None
        if isinstance(lhs, ScaledArray):
            lhs, precision = scaled_values(lhs), lax.Precision.HIGHEST
        if isinstance(rhs, ScaledArray):
            rhs, precision = scaled_values(rhs), lax.Precision.HIGHEST
        common = jnp.promote_types(lhs.dtype, rhs.dtype)
        y = multiply(lhs.astype(common), rhs.astype(common), dimension_numbers, precision)
        return y.astype(dtype)


def _transposed_products(
    lhs_ndim: int, rhs_ndim: int, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[Any, tuple[int, ...], Any, tuple[int, ...]]:
    """Dimension numbers of dgrad and wgrad, each with the transposition that follows it.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(map(tuple, pair)) for pair in dimension_numbers
    )
    lhs_free = free_dims(lhs_ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs_ndim, rhs_contract, rhs_batch)
    n_batch, n_lhs, n_rhs = len(lhs_batch), len(lhs_free), len(rhs_free)
    y_batch = tuple(range(n_batch))
    y_lhs = tuple(range(n_batch, n_batch + n_lhs))
    y_rhs = tuple(range(n_batch + n_lhs, n_batch + n_lhs + n_rhs))

    # dgrad contracts what is free in rhs and gives: batch, lhs free, rhs contracting in rhs' order.
    # wgrad contracts what is free in lhs and gives: batch, lhs contracting in lhs' order, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    return (
        ((y_rhs, rhs_free), (y_batch, rhs_batch)),
        tuple(np.argsort(d_lhs_dims).tolist()),
        ((lhs_free, y_lhs), (lhs_batch, y_batch)),
        tuple(np.argsort(d_rhs_dims).tolist()),
    )
