"""`DotOnTpu`: `Dot` of two matrices, each quantized in one step for both of its products.

A TPU's matrix units take operands in any layout, so that one array of codes serves both directions
wherever one scale does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.kernels.tpu.quantize_operand import quantized_for_both
from jfp8.kernels.tpu.sharded import (
    Division,
    Layout,
    OfMatrix,
    by_parts,
    count_of,
    division_of,
    spec_of,
    spec_of_scale,
)
from jfp8.matmul.spec import Job, are_powers_of_two, as_matrices, plus_bias
from jfp8.products.cast_later import CastLater
from jfp8.products.dot import Dot
from jfp8.products.made import Made
from jfp8.products.observers import OBSERVER
from jfp8.products.operation import Kind, Operand, Sums, Use
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.history import AmaxState
from jfp8.tracing.context import Tpu


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias"],
    meta_fields=["shapes", "dtypes", "dimension_numbers", "implementation", "tpu", "layout"],
)
@dataclass(frozen=True)
class DotOnTpu(Dot):
    """`Dot` on TPUs.

    Attributes:
      tpu: on which the operands are.
      layout: how they lie on several; None: on one, or it is not known.
      bias: ``[n]``, which is added to y; None: none is.
    """

    tpu: Tpu
    layout: Layout | None = None
    bias: jax.Array | None = None

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array | CastLater | Made,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        axes = None
        if self.layout is not None:
            axes = getattr(self.layout, "y" if role == "grad" else role)
        kernels = not self.tpu.divides or axes is not None
        return quantized_for_both(x, first, second, state, kernels=kernels, axes=axes)

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        bias = self.bias if kind == "fprop" else None
        sums = sums._replace(tpu=self.tpu, bias=bias)
        if isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
            if self.layout is not None:
                how = self._division(self.layout, kind)
                if _has_parts(first, how.first) and _has_parts(second, how.second):
                    return self._multiply_on_each(how, kind, first, second, sums)
        elif jnp.bfloat16 in (first.dtype, second.dtype):
            job = Job(self.dimension_numbers, self.dtype_of(kind), *sums)
            pairs = zip((first, second), self.contracting(kind), strict=True)
            first, second = (_in_bf16_if_exact(x, summed, job) for x, summed in pairs)
        return super().multiply(kind, first, second, sums)

    def _division(self, layout: Layout, kind: Kind) -> Division:
        numbers, order, _ = self._product(kind)
        ((a,), (b,)), _ = numbers
        return division_of(layout, kind, (a, b), order)

    def _multiply_on_each(
        self, how: Division, kind: Kind, first: ScaledArray, second: ScaledArray, sums: Sums
    ) -> jax.Array:
        """The product by TPUs that have a part of each operand, and add parts of sums up."""
        sums, last = sums._replace(tpu=replace(self.tpu, divides=False), bias=None), sums.bias
        multiply = super().multiply

        def part(data, scale, data_2, scale_2, bias):
            operands = ScaledArray(data, scale), ScaledArray(data_2, scale_2)
            if not how.summed:
                return multiply(kind, *operands, sums._replace(bias=bias))
            y = multiply(kind, *operands, sums)
            sent = jnp.dtype(sums.parts or y.dtype)
            y = y.astype(sent) if sent == jnp.bfloat16 else y
            for dim, axes in enumerate(how.result):
                scattered = tuple(axis for axis in axes if axis in how.summed)
                if scattered:
                    y = lax.psum_scatter(y, scattered, scatter_dimension=dim, tiled=True)
            others = {axis for axes in how.result for axis in axes}
            if rest := tuple(axis for axis in how.summed if axis not in others):
                y = lax.psum(y, rest)
            return plus_bias(y.astype(self.dtype_of(kind)), bias)

        specs = (
            spec_of(how.first),
            spec_of_scale(first.scale.shape, how.first),
            spec_of(how.second),
            spec_of_scale(second.scale.shape, how.second),
            spec_of(how.result[1:]),
        )
        divided = by_parts(part, specs, spec_of(how.result))
        return divided(first.data, first.scale, second.data, second.scale, last)


def _has_parts(q: ScaledArray, axes: OfMatrix) -> bool:
    """Whether parts of `q` have parts of its scales, as those that kernels quantize have."""
    if q.block is not None or not isinstance(q.scale, jax.Array):
        return False
    parts = map(count_of, axes)
    return all(m == 1 or m % n == 0 for m, n in zip(q.scale.shape, parts, strict=False))


def _in_bf16_if_exact(x: Operand, summed: tuple[int, ...], job: Job) -> Operand:
    """The values of bytes beside an operand that is in bf16 already."""
    if not isinstance(x, ScaledArray) or not are_powers_of_two(x, summed, job):
        return x
    return scaled_values(x).astype(jnp.bfloat16)


def on_tpu(
    tpu: Tpu,
    dot: Dot,
    lhs: jax.Array,
    rhs: Operand,
    bias: jax.Array | None,
    layout: Layout | None,
) -> tuple[Dot, jax.Array, Operand]:
    """`dot` and its operands as matrices, which lie on TPUs as `layout` says, if it is possible."""
    try:
        lhs, rhs, numbers = as_matrices(lhs, rhs, dot.dimension_numbers)
    except ValueError:  # an rhs in bytes, whose blocks are not those of a matrix
        return dot, lhs, rhs
    shapes = lhs.shape, rhs.shape
    if not tpu.divides or jnp.float16 in dot.dtypes:  # in which parts of sums might overflow
        layout = None
    # Statistics are of the product alone.
    by_kernel = (layout is not None or not tpu.divides) and OBSERVER.value is None
    added = lax.stop_gradient(bias) if by_kernel and bias is not None else None
    found = DotOnTpu(shapes, dot.dtypes, numbers, dot.implementation, tpu, layout, added)
    return found, lhs, rhs
