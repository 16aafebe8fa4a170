"""f8 x f8 `dot_general`, for which XLA calls cuBLASLt's FP8 product on CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    fast_accumulation: bool,
) -> jax.Array:
    """f32 product of two f8 arrays, not yet scaled.

    On CUDA the dot algorithm is named. Without one, XLA's GPU compiler is free to pick a kernel
    that always accumulates fast, and ignores ``precision``; other backends refuse the name.

    No tensor core multiplies e5m2 by e5m2. There both become float16, which holds all their values.
    """
    preset = lax.DotAlgorithmPreset
    algorithm = (
        preset.ANY_F8_ANY_F8_F32_FAST_ACCUM if fast_accumulation else preset.ANY_F8_ANY_F8_F32
    )

    def dot(precision, lhs, rhs):
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=jnp.float32
        )

    def cuda(lhs, rhs):
        if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
            return dot(None, lhs.astype(jnp.float16), rhs.astype(jnp.float16))
        return dot(algorithm, lhs, rhs)

    return lax.platform_dependent(lhs, rhs, cuda=cuda, default=lambda lhs, rhs: dot(None, lhs, rhs))
