"""`GroupedKernels`: products of tiles with the matrices of their groups, by Hopper kernels.

    fprop  y [t, n] = q(lhs) [t, k] . q(rhs)^T [g, n, k]     rows of a tile and its group's matrix
    dgrad  dx[t, k] = q(dy)  [t, n] . q(rhs)   [g, k, n]
    wgrad  dw[g, k, n] = q(lhs)^T [k, t] . q(dy)^T [n, t]    summed over the tiles of each group

All tiles of lhs and of the gradient are one matrix, and quantized for both directions in one read.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jfp8.matmul.hopper import product as mosaic
from jfp8.products.both_ways import has_kernel, quantize_both_ways
from jfp8.products.operation import Kind, Operand, Sums, Use
from jfp8.products.ragged.by_tiles import Grouped, grouped_operation
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.context import Gpu, note

BLOCK = mosaic.BLOCK  # rows of a tile, and what the kernels sum before they scale


def why_not_grouped_kernels(recipe: Recipe, rhs: Operand, gpu: Gpu | None) -> str | None:
    """Why `GroupedKernels` cannot compute `recipe` on `gpu`; None if it can."""
    reason = mosaic.BACKEND.why_not_on(gpu)
    if reason is not None:
        return reason
    if isinstance(rhs, ScaledArray):
        return "grouped products with matrices that are kept in FP8"
    reason = mosaic.BACKEND.why_not_sums(recipe.accumulation)
    if reason is not None:
        return reason
    products = recipe.resolved()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return "grouped products of rotated operands"
    for role, (first, second) in products.by_role().items():
        if first is None or first != second or not has_kernel(first):
            return f"a grouped product whose {role} is quantized as {first}, {second}"
        in_blocks = first.block in mosaic.BACKEND.blocks
        if not (in_blocks or first.one_for_both):
            return f"a grouped product whose {role} is quantized as {first}"
        if in_blocks and (role == "rhs") != (first.block == (BLOCK, BLOCK)):
            return f"a grouped product whose {role} has blocks of {first.block}"
    return None


@grouped_operation
@dataclass(frozen=True)
class GroupedKernels(Grouped):
    """Computes what `GroupedDot` does, for tiles of 128 rows."""

    def quantize_for_both(
        self, role: str, x: jax.Array, first: Use, second: Use | None, state: AmaxState | None
    ) -> tuple[Operand, Operand | None, jax.Array]:
        """The tiles as one matrix, and its transpose; the matrices of groups, and theirs."""
        del second  # the kernel always writes both
        quantizer = first.quantizer
        assert quantizer is not None  # see `why_not_grouped_kernels`
        if role == "rhs":
            both = jax.vmap(lambda w: quantize_both_ways(quantizer, w, None))(x)
            straight, other = (_with_scales_by_group(q) for q in both[:2])
            return other, straight, jnp.max(both.amax)
        both = quantize_both_ways(quantizer, x.reshape(-1, x.shape[-1]), state)
        return both.straight, both.transposed, both.amax

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        del sums  # promoted every 128
        assert isinstance(first, ScaledArray)
        assert isinstance(second, ScaledArray)
        count = self.padded_sizes // BLOCK
        tiles, height, _ = self.shapes[0]
        dtype = self.dtype_of(kind)

        def kernel(first: ScaledArray, second: ScaledArray) -> jax.Array:
            from jfp8.matmul.hopper import grouped

            with note("cuda", "mosaic_gpu"):
                if kind == "wgrad":
                    starts = jnp.cumsum(count) - count
                    scales = _scales_of_rows(first, second)
                    return grouped.grouped_outer(
                        first.data, second.data, starts, count, *scales, dtype
                    )
                # Tiles after the last group are not multiplied.
                needed = jnp.where(jnp.arange(tiles) < jnp.sum(count), self.group, -1)
                scales = _scales_of_tiles(first, second)
                y = grouped.grouped_matmul(first.data, second.data, needed, *scales, dtype)
                return y.reshape(tiles, height, y.shape[-1])

        return mosaic.run(kernel, first, second)


def _with_scales_by_group(q: ScaledArray) -> ScaledArray:
    """Matrices that `jax.vmap` stacked, with a scale that has as many dimensions as they have."""
    scale = jnp.asarray(q.scale)
    scale = scale if scale.ndim == 3 else scale[:, None, None]
    return ScaledArray(q.data, scale, None if q.block is None else (1, *q.block))


# Scales as the kernels take them. A kernel multiplies a sum by one factor for each operand that has
# more than one scale; the single scale of the other operand is folded into it.


def _scales_of_rows(a: ScaledArray, b: ScaledArray) -> tuple[jax.Array, jax.Array | None]:
    """f32[k / 128, m] for each of two operands ``[m, k]``, or None where there is nothing left."""
    of_a, of_b = jnp.asarray(a.scale), jnp.asarray(b.scale)
    if not of_a.ndim and not of_b.ndim:
        return _by_chunk(a, of_a * of_b), None
    return _by_chunk(a, of_a), _by_chunk(b, of_b)


def _scales_of_tiles(a: ScaledArray, b: ScaledArray) -> tuple[jax.Array | None, jax.Array]:
    """f32[k / 128, m] for rows ``[m, k]``, f32[g, k / 128, n / 128] for matrices ``[g, n, k]``."""
    g, n, k = b.shape
    of_rows, of_matrices = jnp.asarray(a.scale), jnp.asarray(b.scale).swapaxes(-1, -2)
    if not of_rows.ndim:
        of_matrices = of_rows * of_matrices
    of_matrices = jnp.broadcast_to(of_matrices, (g, -(-k // BLOCK), -(-n // BLOCK)))
    return (_by_chunk(a, of_rows) if of_rows.ndim else None), of_matrices


def _by_chunk(q: ScaledArray, scale: jax.Array) -> jax.Array:
    m, k = q.shape
    return jnp.broadcast_to(scale if not scale.ndim else scale.T, (-(-k // BLOCK), m))
