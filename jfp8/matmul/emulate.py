"""The reference, with which every other implementation must agree: f32 arithmetic on any device.

Sums over the contraction are in f32, or as in hardware, see `chunked_sums`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.chunked_sums import dot_in_chunks
from jfp8.matmul.explained import explained
from jfp8.matmul.spec import (
    HARDWARE_FORMATS,
    MatmulSpec,
    factors_of,
    has_one_scale,
    plain_dot,
    planner_of,
    varies_along_sum,
)
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import decode
from jfp8.tracing.notes import EXPLAINING


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the product of two operands, as the planner for the device computes it."""
    if spec.accumulation.startswith("hopper"):
        if not HARDWARE_FORMATS.issuperset((lhs.format, rhs.format)):
            raise ValueError(
                f"accumulation={spec.accumulation!r} models tensor cores that multiply E4M3FN and "
                f"E5M2, but the operands are {lhs.format.name} and {rhs.format.name}. Use "
                "accumulation='f32'."
            )
        if spec.implementation is None:
            return emulated(lhs, rhs, spec)  # models of hardware are emulated everywhere
    planner = planner_of(spec.device, spec.implementation)
    if planner is not None:
        return planner.multiply(lhs, rhs, spec)
    if EXPLAINING.value is not None:
        with explained("matmul", lhs, rhs, spec):
            return emulated(lhs, rhs, spec)
    return emulated(lhs, rhs, spec)


def emulated(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Multiply in f32 arithmetic."""
    one_scale = has_one_scale(lhs) and has_one_scale(rhs)
    if spec.accumulation != "f32":
        how = {"accumulation": spec.accumulation, "exact": dot_in_f32}
        if varies_along_sum(lhs, rhs, spec):
            return dot_in_chunks(lhs, rhs, spec.dimension_numbers, **how).astype(spec.dtype)
        one = jnp.ones((), jnp.float32)
        data = ScaledArray(lhs.data, one), ScaledArray(rhs.data, one)
        product = dot_in_chunks(*data, spec.dimension_numbers, **how)
    elif not one_scale and varies_along_sum(lhs, rhs, spec):
        values = scaled_values(lhs), scaled_values(rhs)
        product = plain_dot(*values, spec.dimension_numbers, lax.Precision.HIGHEST)
        return product.astype(spec.dtype)
    else:
        product = dot_in_f32(lhs.data, rhs.data, spec.dimension_numbers)
    for factor in factors_of(lhs, rhs, spec):
        product = product * factor
    return product.astype(spec.dtype)


def dot_in_f32(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
) -> jax.Array:
    """Multiply two f8 arrays, not yet scaled, with sums in f32.

    A product of two f8 values is exact in f32, so only the order of the additions is undefined. (It
    is exact in bf16 operands with f32 sums as well, and some processors are twice as fast at that;
    but XLA:CPU fails at run time on such products for some dimension numbers.)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_contract, lhs_batch = tuple(lhs_contract), tuple(lhs_batch)
    # XLA:CPU is fastest if the contraction is the last dimension of lhs, and would otherwise
    # transpose 4-byte values; the barrier prevents it from merging this transposition back in.
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
