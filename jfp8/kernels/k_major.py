"""`KMajorDot`: products of matrices in the layout that NVIDIA's tensor cores take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jfp8.kernels.cuda_backends import known_gpu, quantizing_k_major
from jfp8.kernels.operands import TILE, Arrangement, arrangements
from jfp8.kernels.quantize_and_transpose import Matrix, has_kernel, made_of, quantize_both_ways
from jfp8.matmul.as_matrices import matrix_groups
from jfp8.matmul.planner import multiply
from jfp8.matmul.spec import MatmulSpec, layout_of
from jfp8.products.dot_general import DotSpec
from jfp8.products.operation import Kind, Operand, Operation, Use
from jfp8.quantizers.quantizer import Quantizer
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState

_BOTH_LAST = (((1,), (1,)), ((), ()))


@jax.tree_util.register_static
@dataclass(frozen=True)
class KMajorDot(Operation):
    """``lhs[m, k] . rhs[k, n]`` and its gradients, for plain matrices with the contraction last. ::

        fprop  y [m, n] = q(lhs)  [m, k] . q(rhs)^T [n, k]
        dgrad  dx[m, k] = q(dy)   [m, n] . q(rhs)   [k, n]
        wgrad  dw[k, n] = q(lhs)^T[k, m] . q(dy)^T  [n, m]

    NVIDIA's tensor cores take 8-bit operands in this layout. Each tensor is needed both straight
    and transposed. The transposed bytes are made where the tensor is read to be quantized: later
    they would have to be read and written once more.
    """

    lhs: Arrangement
    rhs: Arrangement
    grad: Arrangement
    kernels: bool  # whether Pallas kernels may quantize
    one_scale: bool  # True if each operand has one scale

    @property
    def rows(self) -> tuple[int, ...]:
        """Return m, or as several dimensions, where lhs has these first and nothing else is merged.

        Shardy cannot shard merged rows along, for example, parts of each sequence.
        """
        (m, _), shape = self.shapes[0], self.lhs.shape
        in_order = not self.lhs.swapped and list(self.lhs.order) == sorted(self.lhs.order)
        first = [shape[:i] for i in range(len(shape)) if in_order and self.one_scale]
        return next((sizes for sizes in first if math.prod(sizes) == m), (m,))

    @property
    def lhs_of_layers(self) -> Any:  # pyrefly: ignore[bad-override]
        return (self.lhs, (*self.rows, self.shapes[0][1])) if self.kernels else None

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[kind]

    def terms(self, kind: Kind) -> int:
        (m, k), (_, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": m}[kind]

    def arrange(self, role: str, x: Any) -> Any:
        arrangement: Arrangement = getattr(self, role)
        return arrangement.matrix(x)

    def made(self, role: str, x: jax.Array, make: Callable[..., Any], *parts: jax.Array) -> Matrix:
        lies = getattr(self, role)
        is_padded = math.prod(lies.values) != math.prod(lies.padded)
        return x if is_padded else made_of(role, x, make, *parts)

    def quantize_for_both(
        self,
        role: str,
        x: Matrix,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
        dtype: np.dtype | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        if not self.kernels or second is None:
            return None
        quantizers = dict.fromkeys([first.quantizer, second.quantizer])
        if not _by_kernels(quantizers, self.one_scale):
            return None
        along_rows = first.contracting == (1,)
        by_rows, by_columns = (first, second) if along_rows else (second, first)
        meets = by_rows.other_scale, by_columns.other_scale
        if role == "grad":
            x = jax.tree.map(lambda x: x.reshape(*self.rows, *x.shape[1:]), x)
        each = {q: quantize_both_ways(q, dtype, x, state, meets) for q in quantizers}
        straight, other = each[by_rows.quantizer].straight, each[by_columns.quantizer].transposed
        largest = each[first.quantizer].amax
        # Devices that lack parts are sent one of them for both matmuls. Of lhs, `other` is saved.
        if self.one_scale and role != "lhs":
            other = replace(other, transposed=straight.data)
        elif self.one_scale and straight.ndim == 1 + len(self.rows):
            straight = replace(straight, transposed=other.data)
        return (straight, other, largest) if along_rows else (other, straight, largest)

    def relayout(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        del role
        return operand if contracting == (1,) else operand.T

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        numbers, of = _BOTH_LAST, {"fprop": self.grad, "dgrad": self.lhs, "wgrad": self.rhs}[kind]
        if self.one_scale and isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
            n = len(self.rows)
            if kind == "wgrad":
                numbers = (tuple(range(1, n + 1)),) * 2, ((), ())
                apart = lambda q: replace(q, data=q.data.reshape(-1, *self.rows))
                first, second = apart(first), apart(second)
            else:
                numbers = ((n,), (1,)), ((), ())
                first = replace(first, data=first.data.reshape(*self.rows, -1))
        spec = replace(spec, dimension_numbers=numbers, dtype=self.dtype_of(kind))
        y = multiply(first, second, spec)
        if kind == "fprop" and isinstance(first, ScaledArray) and first.scale.ndim:
            # A loop over layers uses this result and saves it: XLA would run the kernel twice.
            y = jax.lax.optimization_barrier(y)
        return of.array(y)


def _by_kernels(quantizers: Collection[Quantizer | None], one_scale: bool) -> bool:
    """Return True if kernels quantize a tensor for both matmuls. One scale is the same for both."""
    alike = not one_scale or len(quantizers) == 1
    return alike and all(q is not None and has_kernel(q) for q in quantizers)


def k_major(spec: DotSpec) -> KMajorDot | None:
    """Return `KMajorDot`, if the program is traced for a GPU where it is faster."""
    numbers, options = spec.dimension_numbers, spec.options
    products = options.recipe.resolved()
    three = products.fprop, products.dgrad, products.wgrad
    if numbers[1][0] or any(p.rotation or (p.lhs is None) != (p.rhs is None) for p in three):
        return None
    if spec.has_quantized_rhs and not products.matrices:
        return None
    gpu, sizes = known_gpu(options.device), layout_of(*spec.shapes, numbers).sizes
    found = quantizing_k_major(options.recipe, sizes, gpu, options.implementation)
    return None if found is None else _in_tiles(spec, found)


def _in_tiles(spec: DotSpec, kernels: bool) -> KMajorDot | None:
    """Return the operation on padded matrices; None if bytes would have to be padded."""
    numbers, shapes = spec.dimension_numbers, spec.shapes
    layout, ((lhs_sum, rhs_sum), _) = layout_of(*shapes, numbers), numbers
    tile = TILE if kernels else 1
    quantizers = list(spec.options.recipe.resolved().quantizers())
    if not any(q.block for q in quantizers):
        # Blocks of several rows would hold other rows.
        shapes = _rows_apart(shapes[0], layout.lhs_free, tile), shapes[1]
    m, n, k = (-(-size // tile) * tile for size in layout_of(*shapes, numbers).sizes)
    if spec.has_quantized_rhs and (n, k) != layout.sizes[1:]:
        return None
    by_role = arrangements(shapes, numbers)
    k_is_first = matrix_groups((), layout.lhs_free, lhs_sum)[-1] != lhs_sum
    k_is_last = matrix_groups((), layout.rhs_free, rhs_sum)[-1] == rhs_sum
    return KMajorDot(
        ((m, k), (k, n)),
        spec.dtypes,
        replace(by_role["lhs"], swapped=k_is_first, padded=(m, k), values=spec.shapes[0]),
        replace(by_role["rhs"], swapped=k_is_last, padded=(k, n)),
        replace(by_role["grad"], padded=(m, n), values=layout.shape),
        kernels,
        not any(q.block or q.spans_rows for q in quantizers),
    )


def _rows_apart(shape: tuple[int, ...], free: tuple[int, ...], tile: int) -> tuple[int, ...]:
    """Return `shape` with its last free dimension padded so that all together fill tiles.

    Zeros after the last row of all would move rows between devices that hold whole sequences.
    """
    if len(free) < 2:
        return shape
    unit = tile // math.gcd(math.prod(shape[d] for d in free[:-1]), tile)
    rows = shape[free[-1]]
    size = -(-rows // unit) * unit
    if 32 * (size - rows) > size:  # too many zeros
        return shape
    return tuple(size if d == free[-1] else n for d, n in enumerate(shape))
