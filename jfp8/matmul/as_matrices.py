"""Products of arrays of any shape, as products of (batches of) matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.matmul.spec import Numbers, free_dims, layout_of, to_output
from jfp8.scaling.arrays import ScaledArray


def as_matrices(lhs: jax.Array, rhs: Any, numbers: Numbers) -> tuple[jax.Array, Any, Numbers]:
    """Reshape to at most one batch, free and contracting dimension each; blocks are not cut."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    layout = layout_of(lhs.shape, rhs.shape, numbers)
    lhs, lhs_k = as_matrix(lhs, lhs_batch, layout.lhs_free, lhs_contract)
    rhs, rhs_k = as_matrix(rhs, rhs_batch, layout.rhs_free, rhs_contract)
    batch = ((0,), (0,)) if lhs_batch else ((), ())
    return lhs, rhs, (((lhs_k,), (rhs_k,)), batch)


def as_matrix(
    x: Any, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]
) -> tuple[Any, int]:
    """Return `x` with each of three groups of dimensions merged, and the position of `contract`."""
    groups = matrix_groups(batch, free, contract)
    order = [d for group in groups for d in group]
    x = x if order == sorted(order) else x.transpose(order)
    sizes = iter(x.shape)
    x = x.reshape([math.prod(next(sizes) for _ in group) for group in groups])
    return x, len(groups) - 1 if groups[-1] == tuple(contract) else len(groups) - 2


def matrix_groups(
    batch: Sequence[int], free: Sequence[int], contract: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the dimensions of an operand that each dimension of its matrix merges.

    The batch dimension comes first, if there is one; the other two keep their order, and are added
    if they are missing. Nothing is transposed unless a group is out of order or not contiguous.
    """
    matrix = sorted((tuple(free), tuple(contract)))
    return [tuple(batch), *matrix] if batch else matrix


def row_scales(q: ScaledArray, contract: Sequence[int], batch: Sequence[int]) -> jax.Array:
    """Return the scales as f32[], or one for each free index, f32[(batch,) free]."""
    scale = jnp.asarray(q.scale)
    if not scale.ndim:
        return scale
    free = free_dims(q.ndim, contract, batch)
    scale = to_output(scale, q, batch, free, 0, 0)
    scale = jnp.broadcast_to(scale, [q.shape[d] for d in (*batch, *free)])
    size = math.prod(q.shape[d] for d in free)
    return scale.reshape(-1, size) if batch else scale.reshape(size)
