"""Products of matrices that are quantized, stored and multiplied with the contraction last.

    fprop  y [m, n] = q(lhs)  [m, k] . q(rhs)^T [n, k]
    dgrad  dx[m, k] = q(dy)   [m, n] . q(rhs)   [k, n]
    wgrad  dw[k, n] = q(lhs)^T[k, m] . q(dy)^T  [n, m]

So NVIDIA's tensor cores take operands of 8 bits. Each tensor is needed both straight and
transposed, and the transposed bytes are made where the tensor is read to be quantized: later they
would have to be read and written once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jfp8.matmul import choice
from jfp8.matmul.choice import Implementation
from jfp8.matmul.hopper import product as hopper
from jfp8.products.both_ways import has_kernel, quantize_both_ways, transposed
from jfp8.products.dot import Dot
from jfp8.products.operation import Kind, Operand, Operation, Use
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState

_PLAIN = (((1,), (0,)), ((), ()))
_BOTH_LAST = (((1,), (1,)), ((), ()))


@dataclass(frozen=True)
class ContractionLast(Operation):
    """``lhs[m, k] . rhs[k, n]`` and its gradients, of plain matrices.

    Attributes:
      dot: the same products of operands as they come.
      kernels: whether Pallas kernels may quantize.
    """

    dot: Dot
    kernels: bool

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.dot.contracting(kind)

    def terms(self, kind: Kind) -> int:
        return self.dot.terms(kind)

    def quantize_for_both(
        self, role: str, x: jax.Array, first: Use, second: Use | None, state: AmaxState | None
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        del role
        if not self.kernels or second is None or first.quantizer != second.quantizer:
            return None
        if first.quantizer is None or not has_kernel(first.quantizer):
            return None
        both = quantize_both_ways(first.quantizer, x, state)
        along_rows = first.contracting == (1,)
        straight, other = both.straight, both.transposed
        return (straight, other, both.amax) if along_rows else (other, straight, both.amax)

    def laid_out(self, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        if contracting == (1,):
            return operand
        return transposed(operand) if isinstance(operand, ScaledArray) else operand.T

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
        lhs_dtype, rhs_dtype, y_dtype = self.dot.dtypes
        dtype = {"fprop": y_dtype, "dgrad": lhs_dtype, "wgrad": rhs_dtype}[kind]
        return self.dot.product(first, second, _BOTH_LAST, dtype, how, accumulation)


TILE = 128  # of the kernels; what is no multiple gets zeros, once, where it is still unquantized


def contraction_last(
    sizes: tuple[int, int, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    recipe: Recipe,
    implementation: Implementation,
) -> ContractionLast | None:
    """The operation for ``(m, n, k)``, if the program is traced for a GPU where it is faster.

    It may be for larger matrices, with zeros behind the values.
    """
    products = recipe.products()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return None
    quantizers = products.quantizers()
    formats, blocks = {q.fmt for q in quantizers}, {q.block for q in quantizers if q.block}
    backend = choice.contraction_last(sizes, formats, blocks, recipe.accumulation, implementation)
    if backend is None:
        return None
    kernels = backend is hopper.BACKEND
    m, n, k = (-(-size // TILE) * TILE for size in sizes) if kernels else sizes
    dot = Dot(_PLAIN, ((m, k), (k, n)), dtypes, implementation)
    return ContractionLast(dot, kernels)
