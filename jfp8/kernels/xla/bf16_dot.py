"""Matmuls on bf16 tensor cores, if FP8 is not available or does not pay off."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.backend import Backend
from jfp8.kernels.operands import factors_by_kernels
from jfp8.matmul.known_scales import are_powers_of_two, scale_dtype, varies_along_sum
from jfp8.matmul.spec import MatmulSpec, Numbers, layout_of, plain_dot, times, to_output
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import decode


def in_bf16(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Multiply on bf16 tensor cores: for GPUs where FP8 is not available, or does not pay off.

    8-bit values are exact in bf16, also times a power of two. With other scales that vary along the
    contraction, three bf16 matmuls replace one, with a negligible loss of accuracy.
    """
    if not varies_along_sum(lhs, rhs, spec):
        factors = factors_by_kernels(lhs, rhs, spec)
        return exact_product(lhs.data, rhs.data, spec.dimension_numbers, factors, spec.dtype)
    (first, of_lhs), (second, of_rhs), factors = _apart(lhs), _apart(rhs), []
    _, (lhs_batch, rhs_batch) = spec.dimension_numbers
    layout = layout_of(lhs.shape, rhs.shape, spec.dimension_numbers)
    rows, columns = layout.lhs_free, layout.rhs_free
    if of_lhs is not None:
        factors.append(to_output(of_lhs, lhs, lhs_batch, rows, 0, len(columns)))
    if of_rhs is not None:
        factors.append(to_output(of_rhs, rhs, rhs_batch, columns, len(rows), 0))
    operands = zip((lhs, rhs), spec.dimension_numbers[0], strict=True)
    if all(scale_dtype(q).itemsize == 1 or are_powers_of_two(q, k, spec) for q, k in operands):
        a, b = (scaled_values(q).astype(jnp.bfloat16) for q in (first, second))
        y = plain_dot(a, b, spec.dimension_numbers)
    else:
        three = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
        y = plain_dot(scaled_values(first), scaled_values(second), spec.dimension_numbers, three)
    return times(y, factors).astype(spec.dtype)


def exact_product(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Numbers,
    factors: Sequence[jax.Array],
    dtype: np.dtype,
) -> jax.Array:
    """Compute ``dot_general(lhs, rhs) * factors`` of f8 arrays. Each f8 value is exact in bf16."""
    lhs, rhs = (decode(x).astype(jnp.bfloat16) for x in (lhs, rhs))
    y = lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)
    return times(y, factors).astype(dtype)


def _apart(q: ScaledArray) -> tuple[ScaledArray, jax.Array | None]:
    """Return `q` without the scale above its blocks' scales; and this, of each row or of all."""
    outer = q.scale.scale if isinstance(q.scale, ScaledArray) else None
    if not isinstance(q.scale, ScaledArray) or outer is None or isinstance(outer, ScaledArray):
        return q, None
    return ScaledArray(q.data, ScaledArray(q.scale.data, jnp.ones((), jnp.float32)), q.block), outer


BACKEND = Backend("bf16", in_bf16, accumulations=("f32",))
