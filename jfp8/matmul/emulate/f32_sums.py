"""Sums over a contraction in f32: f8 values in f32 arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.scaling.bits import decode


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    fast_accumulation: bool,
) -> jax.Array:
    """f32 product of two f8 arrays, not yet scaled.

    A product of two f8 values is exact in f32, so only the order of the additions is left open.
    (It is exact in bf16 operands with f32 sums as well, and some processors are twice as fast at
    that; but XLA:CPU fails at run time on such products for some dimension numbers.)
    """
    del fast_accumulation  # a licence for hardware, which the reference does not take
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_contract, lhs_batch = tuple(lhs_contract), tuple(lhs_batch)
    # XLA:CPU multiplies fastest what is contracted along the last dimension of lhs, and would
    # otherwise transpose values of four bytes; the barrier keeps it from folding this one back in.
    free = [d for d in range(lhs.ndim) if d not in lhs_contract + lhs_batch]
    order = [*lhs_batch, *free, *lhs_contract]
    if order != sorted(order):
        lhs = lax.optimization_barrier(lhs.transpose(order))
        lhs_batch = tuple(range(len(lhs_batch)))
        lhs_contract = tuple(range(lhs.ndim - len(lhs_contract), lhs.ndim))
    # HIGHEST: on accelerators the default would round the operands or the sums to fewer bits.
    return lax.dot_general(
        decode(lhs),
        decode(rhs),
        ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
