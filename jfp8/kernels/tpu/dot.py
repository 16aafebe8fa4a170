"""The planner for TPUs: `Dot` of two matrices, each quantized in one step for both of its matmuls.

A TPU's matrix units accept operands in any layout, so one array of codes serves both directions
if one scale does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.operands import Arrangement, arrangements, dtype_of_partial_sums
from jfp8.kernels.tpu import sharded
from jfp8.kernels.tpu.backend import multiply as multiply_on_tpu
from jfp8.kernels.tpu.quantize_operand import quantized_for_both
from jfp8.kernels.tpu.sharded import Division, OfMatrix, Shardings
from jfp8.matmul.as_matrices import matrix_groups
from jfp8.matmul.planner import Planner, multiply
from jfp8.matmul.spec import MatmulSpec, layout_of
from jfp8.products.bias import plus_bias
from jfp8.products.dot_general import Dot, DotSpec, three_matmuls
from jfp8.products.observers import OBSERVER
from jfp8.products.operation import Kind, Operand, Options, Use
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.backends import why_left_out
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.devices import Tpu


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias"],
    meta_fields=["shapes", "dtypes", "dimension_numbers", "tpu", "given", "shardings"],
)
@dataclass(frozen=True)
class DotOnTpu(Dot):
    """Compute `Dot` on TPUs, from its operands as matrices.

    Attributes:
      given: arrangements of lhs, rhs and grad as matrices.
      shardings: shardings over several TPUs; None for one TPU, or if unknown.
      bias: ``[n]``, which is added to y; None for no bias.
    """

    tpu: Tpu
    given: tuple[Arrangement, Arrangement, Arrangement]
    shardings: Shardings | None = None
    bias: jax.Array | None = None

    def arrange(self, role: str, x: Any) -> Any:
        x = super().arrange(role, x)
        return self.given[("lhs", "rhs", "grad").index(role)].matrix(x)

    def with_bias(self, bias: jax.Array, options: Options) -> DotOnTpu | None:
        by_kernel = self.shardings is not None or not self.tpu.divides
        rounds_y = options.recipe.resolved().fprop.output  # before the bias is added
        # Statistics are of the matmul alone.
        if not by_kernel or rounds_y or OBSERVER.value is not None:
            return None
        return replace(self, bias=bias)

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
        dtype: np.dtype | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        axes = None
        if self.shardings is not None:
            axes = getattr(self.shardings, "y" if role == "grad" else role)
        by_kernels = not self.tpu.divides or axes is not None
        kernels = by_kernels and why_left_out("mosaic_tpu") is None
        return quantized_for_both(x, first, second, state, dtype, kernels=kernels, axes=axes)

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        bias = self.bias if kind == "fprop" else None
        numbers, order, _ = three_matmuls(self.shapes, self.dimension_numbers)[kind]
        how = {"dimension_numbers": numbers, "dtype": self.dtype_of(kind), "device": self.tpu}
        spec, of_result = replace(spec, **how), ("dgrad", "wgrad", "fprop").index(kind)

        def whole(first, second, bias, spec):
            if isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
                y = multiply_on_tpu(first, second, spec, bias)
            else:
                y = plus_bias(multiply(first, second, spec, dtype_of_partial_sums(spec)), bias)
            return y if order is None else y.transpose(order)

        product: Any = whole
        if isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
            if self.shardings is not None:
                ((a,), (b,)), _ = numbers
                division = sharded.division_of(self.shardings, kind, (a, b), order)
                if _has_parts(first, division.first) and _has_parts(second, division.second):
                    spec = replace(spec, device=replace(self.tpu, divides=False))
                    product = partial(_on_each, whole, division)
        return self.given[of_result].array(product(first, second, bias, spec))


def _on_each(
    product: Callable[..., jax.Array],
    division: Division,
    first: ScaledArray,
    second: ScaledArray,
    bias: jax.Array | None,
    spec: MatmulSpec,
) -> jax.Array:
    """Multiply on TPUs that have a shard of each operand, and add partial sums."""

    def part(data, scale, data_2, scale_2, bias):
        operands = ScaledArray(data, scale), ScaledArray(data_2, scale_2)
        if not division.summed:
            return product(*operands, bias, spec)
        y = product(*operands, None, spec)
        sent = jnp.dtype(spec.partial_dtype or y.dtype)
        y = y.astype(sent) if sent == jnp.bfloat16 else y
        for dim, axes in enumerate(division.result):
            scattered = tuple(axis for axis in axes if axis in division.summed)
            if scattered:
                y = lax.psum_scatter(y, scattered, scatter_dimension=dim, tiled=True)
        others = {axis for axes in division.result for axis in axes}
        if rest := tuple(axis for axis in division.summed if axis not in others):
            y = lax.psum(y, rest)
        return plus_bias(y.astype(spec.dtype), bias)

    specs = (
        sharded.spec_of(division.first),
        sharded.spec_of_scale(first.scale.shape, division.first),
        sharded.spec_of(division.second),
        sharded.spec_of_scale(second.scale.shape, division.second),
        sharded.spec_of(division.result[1:]),
    )
    result = sharded.spec_of(division.result)
    divided = jax.shard_map(part, in_specs=specs, out_specs=result, check_vma=False)
    return divided(first.data, first.scale, second.data, second.scale, bias)


def _has_parts(q: ScaledArray, axes: OfMatrix) -> bool:
    """Return True if shards of `q` have shards of its scales, as from kernels that quantize."""
    if q.block is not None or not isinstance(q.scale, jax.Array):
        return False
    parts = map(sharded.count_of, axes)
    return all(m == 1 or m % n == 0 for m, n in zip(q.scale.shape, parts, strict=False))


class Mosaic(Planner):
    """Plan `DotOnTpu` for a matmul of matrices, and the reference for all else."""

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        return multiply_on_tpu(lhs, rhs, spec)

    def plan(self, spec: Any) -> Any:
        matrices = isinstance(spec, DotSpec) and not spec.dimension_numbers[1][0]
        return (_of_matrices(spec) if matrices else None) or super().plan(spec)


def _of_matrices(spec: DotSpec) -> DotOnTpu | None:
    """Return `DotOnTpu`; None if neither TPUs nor interpreted kernels compute it."""
    numbers, tpu = spec.dimension_numbers, spec.options.device
    if not isinstance(tpu, Tpu):  # named, elsewhere: kernels are interpreted
        if not kernels_are_interpreted():
            return None
        tpu = Tpu("TPU")
    by_role = arrangements(spec.shapes, numbers)
    if spec.has_quantized_rhs and by_role["rhs"].sizes != spec.shapes[1]:
        return None  # its blocks may not be blocks of a matrix
    shardings = None
    # In f16 partial sums might overflow.
    if spec.sharding is not None and tpu.divides and jnp.float16 not in spec.dtypes:
        specs, shapes, given = spec.sharding
        shardings = sharded.matrix_shardings(specs, shapes, given)
    whole, ((lhs_sum, rhs_sum), _) = layout_of(*spec.shapes, numbers), numbers
    lhs_k = int(matrix_groups((), whole.lhs_free, lhs_sum)[-1] == lhs_sum)
    rhs_k = int(matrix_groups((), whole.rhs_free, rhs_sum)[-1] == rhs_sum)
    shapes = by_role["lhs"].sizes, by_role["rhs"].sizes
    matrices = (((lhs_k,), (rhs_k,)), ((), ()))
    given = by_role["lhs"], by_role["rhs"], by_role["grad"]
    return DotOnTpu(shapes, spec.dtypes, matrices, tpu, given, shardings)
