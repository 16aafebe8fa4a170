"""`GroupedKernels`: matmuls of tiles with the matrices of their groups, by Hopper kernels.

    fprop  y [t, n] = q(lhs) [t, k] . q(rhs)^T [g, n, k]     rows of a tile and its group's matrix
    dgrad  dx[t, k] = q(dy)  [t, n] . q(rhs)   [g, k, n]
    wgrad  dw[g, k, n] = q(lhs)^T [k, t] . q(dy)^T [n, t]    summed over the tiles of each group

The tiles of lhs form one matrix, as do those of the gradient, quantized both ways in one read.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jfp8.kernels.hopper import backend as mosaic
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.operands import scales_by_block
from jfp8.kernels.partitioning import divided, divided_sum
from jfp8.kernels.quantize_and_transpose import (
    Made,
    Matrix,
    has_kernel,
    made_of,
    quantize_both_ways,
)
from jfp8.kernels.verdicts import why_failed
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.operation import Kind, Operand, Use
from jfp8.products.ragged.by_tiles import Grouped, GroupedDot, grouped_operation
from jfp8.quantizers.quantizer import Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note

BLOCK = mosaic.BLOCK  # rows of a tile, and the number of terms that kernels sum before they scale


def why_not_grouped_kernels(recipe: Recipe, has_quantized_rhs: bool, gpu: Gpu | None) -> str | None:
    """Return the reason why `GroupedKernels` cannot compute `recipe` on `gpu`; None if it can."""
    reason = mosaic.BACKEND.why_not_on(gpu) or why_failed(("quantizing", "grouped products"), gpu)
    if reason is not None:
        return reason
    if has_quantized_rhs:
        return "grouped matmuls with matrices that are stored in FP8"
    reason = mosaic.BACKEND.why_not_sums(recipe.accumulation)
    if reason is not None:
        return reason
    products = recipe.resolved()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return "grouped matmuls of rotated operands"
    for role, (first, second) in products.by_role().items():
        if not _is_taken(role, first, second):
            return f"a grouped matmul whose {role} is quantized as {first}, {second}"
    return None


def _is_taken(role: str, first: Quantizer | None, second: Quantizer | None) -> bool:
    """Return True if kernels quantize a tensor for both of its matmuls, and multiply it."""
    if first is None or second is None or not (has_kernel(first) and has_kernel(second)):
        return False
    tile = (BLOCK, BLOCK)
    if first != second:
        return role == "lhs" and (first.block, second.block) == ((BLOCK, 1), tile)
    if first.block in mosaic.BACKEND.blocks:
        return (role == "rhs") == (first.block == tile)
    return first.one_for_both


@grouped_operation
@dataclass(frozen=True)
class GroupedKernels(Grouped):
    """Compute the result of `GroupedDot`, for tiles of 128 rows."""

    made = staticmethod(made_of)

    @classmethod
    def dimensions(cls, kind: Kind) -> tuple[str, str, str]:
        return {
            "fprop": ("tk", "Enk", "thn"),
            "dgrad": ("tn", "Ekn", "thk"),
            "wgrad": ("kt", "nt", "Ekn"),
        }[kind]

    def relayout(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        """Return the result of `quantize_for_both`, for operands that were quantized elsewhere."""
        assert isinstance(operand, ScaledArray)
        if role == "rhs":
            return operand if contracting == (2,) else operand.transpose(0, 2, 1)
        rows = lambda x: x.reshape(-1, x.shape[-1]) if x.ndim else x
        block = None if operand.block is None else operand.block[1:]
        # A kernel that gathers and one that transposes: one for both took six times as long.
        data = with_layout_constraint(rows(operand.data), Layout((0, 1)))
        data = lax.optimization_barrier(data)
        matrix = ScaledArray(data, rows(operand.scale), block)
        return matrix if contracting == (2,) else matrix.T

    def quantize_for_both(
        self,
        role: str,
        x: Matrix,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
        dtype: np.dtype | None,
    ) -> tuple[Operand, Operand | None, jax.Array]:
        """Quantize the tiles as one matrix, and its transpose; likewise the matrices of groups."""
        quantizer = first.quantizer
        assert quantizer is not None  # see `why_not_grouped_kernels`
        again = quantizer if second is None else second.quantizer
        if role == "rhs":
            both = jax.vmap(lambda w: quantize_both_ways(quantizer, dtype, w, None))(x)
            straight, other = (_with_scales_by_group(q) for q in both[:2])
            return other, straight, jnp.max(both.amax)
        rows = x if isinstance(x, Made) else x.reshape(-1, x.shape[-1])
        each = dict.fromkeys((quantizer, again))
        both = {q: quantize_both_ways(q, dtype, rows, state) for q in each}
        return both[quantizer].straight, both[again].transposed, both[quantizer].amax

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        assert isinstance(first, ScaledArray)
        assert isinstance(second, ScaledArray)
        tiles, height, _ = self.shapes[0]
        dtype = self.dtype_of(kind)

        def kernel(self: Grouped, first: ScaledArray, second: ScaledArray) -> jax.Array:
            # Tiles after the last group are not multiplied.
            used = jnp.arange(tiles) < jnp.sum(self.padded_sizes // BLOCK)
            group, groups = jnp.where(used, self.group, -1), self.padded_sizes.shape[0]
            if kind == "wgrad":
                return _outer(first, second, group, groups, dtype, spec.partial_dtype)
            y = _matmul(first, second, group, dtype)
            return y.reshape(tiles, height, y.shape[-1])

        def by_tiles(self: Grouped, first: ScaledArray, second: ScaledArray) -> jax.Array:
            plain = GroupedDot(self.shapes, self.dtypes, self.group, self.padded_sizes)
            if kind == "wgrad":
                first, second = _tiles(first.T, tiles), _tiles(second.T, tiles)
            else:
                first = _tiles(first, tiles)
                second = second.transpose(0, 2, 1) if kind == "fprop" else second
            return plain.by_tiles(kind, first, second, spec).astype(dtype)

        with note("cuda", "mosaic_gpu"):
            elsewhere = spec.implementation or by_tiles
            return on_platform("cuda", kernel, elsewhere, self, first, second)


def _tiles(q: ScaledArray, count: int) -> ScaledArray:
    stack = lambda x: x.reshape(count, -1, x.shape[-1]) if x.ndim else x
    block = None if q.block is None else (1, *q.block)
    return ScaledArray(stack(q.data), stack(q.scale), block)


def _with_scales_by_group(q: ScaledArray) -> ScaledArray:
    """Return matrices that `jax.vmap` stacked, with a scale of as many dimensions."""
    scale = jnp.asarray(q.scale)
    scale = scale if scale.ndim == 3 else scale[:, None, None]
    return ScaledArray(q.data, scale, None if q.block is None else (1, *q.block))


# Dimensions have the names that the kernels use. A device may have a shard of any but the groups.
# A kernel multiplies a sum by one factor for each operand with more than one scale. The single
# scale of the other operand is folded into this factor.


def _matmul(a: ScaledArray, b: ScaledArray, group: jax.Array, dtype: np.dtype) -> jax.Array:
    """Multiply each tile of `a` by the matrix of its group."""
    from jfp8.kernels.hopper.grouped import grouped_matmul

    g, n, k = b.shape
    of_rows, of_matrices = jnp.asarray(a.scale), jnp.asarray(b.scale).swapaxes(-1, -2)
    of_matrices = of_matrices if of_rows.ndim else of_rows * of_matrices
    of_matrices = jnp.broadcast_to(of_matrices, (g, -(-k // BLOCK), -(-n // BLOCK)))

    def function(a, b, group, of_matrices, of_rows=None):
        return grouped_matmul(a, b, group, of_rows, of_matrices, dtype)

    rule = f"m k, G n k, m/{BLOCK}, G k/{BLOCK} n/{BLOCK}"
    operands = (a.data, b.data, group, of_matrices)
    if of_rows.ndim:
        rule, operands = f"{rule}, k/{BLOCK} m", (*operands, _by_chunk(a, of_rows))
    return divided("grouped_matmul", function, f"{rule} -> m n", combine="sum")(*operands)


def _outer(
    a: ScaledArray,
    b: ScaledArray,
    group: jax.Array,
    groups: int,
    dtype: np.dtype,
    parts: np.dtype | None,
) -> jax.Array:
    """Sum over the tiles of each group, of which a device may have some or none."""
    from jfp8.kernels.hopper.grouped import grouped_outer

    of_a, of_b = jnp.asarray(a.scale), jnp.asarray(b.scale)
    has_two = of_a.ndim or of_b.ndim

    def product(dtype, a, b, group, of_a, of_b=None):
        mine = group[None, :] == jnp.arange(groups)[:, None]
        count = jnp.sum(mine, axis=1, dtype=jnp.int32)
        return grouped_outer(a, b, jnp.cumsum(count) - count, count, of_a, of_b, dtype)

    rule = f"i m, j m, m/{BLOCK}, m/{BLOCK} i"
    operands = (a.data, b.data, group, _by_chunk(a, of_a if has_two else of_a * of_b))
    if has_two:
        rule, operands = f"{rule}, m/{BLOCK} j", (*operands, _by_chunk(b, of_b))
    return divided_sum("grouped_outer", product, f"{rule} -> G i j", dtype, parts)(*operands)


def _by_chunk(q: ScaledArray, scale: jax.Array) -> jax.Array:
    """Return f32[k / 128, m] for an operand ``[m, k]``."""
    return scales_by_block(scale, q, (), {1: BLOCK, 0: 1})
