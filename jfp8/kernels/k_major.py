"""`ContractionLast`: products of matrices in the layout that NVIDIA's tensor cores take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels import choice
from jfp8.kernels.choice import Implementation
from jfp8.kernels.quantize_and_transpose import has_kernel, quantize_both_ways
from jfp8.matmul.spec import Numbers, as_matrices
from jfp8.products.cast_later import CastLater
from jfp8.products.dot import multiply_operands
from jfp8.products.made import Made
from jfp8.products.operation import Kind, Operand, Operation, Sums, Use
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState

_BOTH_LAST = (((1,), (1,)), ((), ()))
TILE = 128  # of the kernels; other sizes are padded with zeros, once, before quantization


@jax.tree_util.register_static
@dataclass(frozen=True)
class ContractionLast(Operation):
    """``lhs[m, k] . rhs[k, n]`` and its gradients, for plain matrices with the contraction last. ::

        fprop  y [m, n] = q(lhs)  [m, k] . q(rhs)^T [n, k]
        dgrad  dx[m, k] = q(dy)   [m, n] . q(rhs)   [k, n]
        wgrad  dw[k, n] = q(lhs)^T[k, m] . q(dy)^T  [n, m]

    NVIDIA's tensor cores take 8-bit operands in this layout. Each tensor is needed both straight
    and transposed. The transposed bytes are made where the tensor is read to be quantized: later
    they would have to be read and written once more.

    Attributes:
      shapes, dtypes: see `Operation`.
      implementation: see `scaled_matmul`.
      kernels: whether Pallas kernels may quantize.
    """

    implementation: Implementation
    kernels: bool

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[kind]

    def terms(self, kind: Kind) -> int:
        (m, k), (_, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": m}[kind]

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array | CastLater | Made,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        del role
        if not self.kernels or second is None or first.quantizer != second.quantizer:
            return None
        if first.quantizer is None or not has_kernel(first.quantizer):
            return None
        along_rows = first.contracting == (1,)
        by_rows, by_columns = (first, second) if along_rows else (second, first)
        meets = by_rows.other_scale, by_columns.other_scale
        straight, other, largest = quantize_both_ways(first.quantizer, x, state, meets)
        return (straight, other, largest) if along_rows else (other, straight, largest)

    def laid_out(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        del role
        if contracting == (1,):
            return operand
        return operand.T

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        dtype = self.dtype_of(kind)
        return multiply_operands(first, second, _BOTH_LAST, dtype, sums, self.implementation)


def contraction_last(
    sizes: tuple[int, int, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    recipe: Recipe,
    implementation: Implementation,
) -> ContractionLast | None:
    """`ContractionLast` for ``(m, n, k)``, if the program is traced for a GPU where it is faster.

    Its matrices may be larger, with zeros behind the values.
    """
    products = recipe.resolved()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return None
    quantizers = products.quantizers()
    formats, blocks = {q.fmt for q in quantizers}, {q.block for q in quantizers if q.block}
    found = choice.contraction_last(sizes, formats, blocks, recipe.accumulation, implementation)
    if found is None:
        return None
    kernels = found == "kernels"
    m, n, k = (-(-size // TILE) * TILE for size in sizes) if kernels else sizes
    return ContractionLast(((m, k), (k, n)), dtypes, implementation, kernels)


def plain_matrices(
    lhs: jax.Array,
    rhs: Operand,
    dimension_numbers: Numbers,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[jax.Array, Operand]:
    """The operands as ``[m, k]`` and ``[k, n]``, padded with zeros to `shapes`."""
    lhs, rhs, (((lhs_k,), (rhs_k,)), _) = as_matrices(lhs, rhs, dimension_numbers)
    lhs, rhs = (lhs.T if lhs_k == 0 else lhs), (rhs.T if rhs_k == 1 else rhs)
    return _grown(lhs, shapes[0]), _grown(rhs, shapes[1])


def _grown(x: Any, shape: tuple[int, ...]) -> Any:
    """`x` padded with zeros to `shape`."""
    if x.shape == shape or isinstance(x, ScaledArray):
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])
