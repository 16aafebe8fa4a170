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
from jfp8.products.dot import multiply_operands
from jfp8.products.operation import Kind, Operand, Operation, Sums, Use
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState

_BOTH_LAST = (((1,), (1,)), ((), ()))
TILE = 128  # of the kernels; what is no multiple gets zeros, once, where it is still unquantized


@jax.tree_util.register_static
@dataclass(frozen=True)
class ContractionLast(Operation):
    """``lhs[m, k] . rhs[k, n]`` and its gradients, of plain matrices.

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

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        dtype = self.dtype_of(kind)
        return multiply_operands(first, second, _BOTH_LAST, dtype, sums, self.implementation)


def contraction_last(
    sizes: tuple[int, int, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    recipe: Recipe,
    implementation: Implementation,
) -> ContractionLast | None:
    """The operation for ``(m, n, k)``, if the program is traced for a GPU where it is faster.

    It may be for larger matrices, with zeros behind the values.
    """
    products = recipe.resolved()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return None
    quantizers = products.quantizers()
    formats, blocks = {q.fmt for q in quantizers}, {q.block for q in quantizers if q.block}
    backend = choice.contraction_last(sizes, formats, blocks, recipe.accumulation, implementation)
    if backend is None:
        return None
    kernels = backend is hopper.BACKEND
    m, n, k = (-(-size // TILE) * TILE for size in sizes) if kernels else sizes
    return ContractionLast(((m, k), (k, n)), dtypes, implementation, kernels)
