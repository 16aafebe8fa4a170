"""The reference product: f8 values in f32, on any device. Every other backend is held to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.formats import decode


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
    # HIGHEST: on accelerators the default would round the operands or the sums to fewer bits.
    return lax.dot_general(
        decode(lhs),
        decode(rhs),
        dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
