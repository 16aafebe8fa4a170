"""The matmul of a quantized operand and one in high precision."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.known_scales import are_powers_of_two, varies_along
from jfp8.matmul.spec import MatmulSpec, layout_of, plain_dot, times, to_output
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.codes import decode


def multiply_dequantized(
    lhs: ScaledArray | jax.Array,
    rhs: ScaledArray | jax.Array,
    spec: MatmulSpec,
    sum_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Return the ``dot_general`` of operands, of which one is quantized, in f32 arithmetic.

    Where the other one is in bf16, accelerators multiply the values in bf16 if that is exact, up to
    scales that do not vary along the sum and are applied after it.
    """
    which = 0 if isinstance(lhs, ScaledArray) else 1
    q, x = (lhs, rhs) if which == 0 else (rhs, lhs)
    assert isinstance(q, ScaledArray)
    assert not isinstance(x, ScaledArray)
    sums, batches = spec.dimension_numbers
    exact = None
    if spec.device is not None and x.dtype == jnp.bfloat16:
        exact = exact_in_bf16(q, sums[which], spec)
    values, scales = (scaled_values(q), ()) if exact is None else exact
    x = x.astype(values.dtype)
    a, b = (values, x) if which == 0 else (x, values)
    precision = lax.Precision.HIGHEST if exact is None else None
    y = plain_dot(a, b, spec.dimension_numbers, precision, sum_dtype)
    layout = layout_of(a.shape, b.shape, spec.dimension_numbers)
    free = layout.lhs_free, layout.rhs_free
    around = (0, len(free[1])) if which == 0 else (len(free[0]), 0)
    factors = [to_output(s, q, batches[which], free[which], *around) for s in scales]
    return times(y, factors).astype(spec.dtype)


def exact_in_bf16(
    q: ScaledArray, summed: Sequence[int], spec: MatmulSpec
) -> tuple[jax.Array, tuple[jax.Array, ...]] | None:
    """Return bf16 values and f32 scales for their sums; None if the values are not exact in bf16.

    Each stored value is a bf16 value, also times a power of two. A value of 4 bits times an E4M3
    scale is one as well: its scale above the scales of blocks is applied after the sum.
    """
    if not varies_along(q, summed):
        return decode(q.data).astype(jnp.bfloat16), scale_as_f32_pair(q)
    if are_powers_of_two(q, summed, spec):
        return scaled_values(q).astype(jnp.bfloat16), ()
    if not isinstance(q.scale, ScaledArray) or isinstance(q.scale.scale, ScaledArray):
        return None
    outer = q.scale.scale
    # Each has a hidden bit, and bf16 has 8 bits.
    few_bits = q.format.mantissa_bits + q.scale.format.mantissa_bits + 2 <= 8
    if not few_bits or (outer.ndim and any(outer.shape[d] != 1 for d in summed)):
        return None
    inner = ScaledArray(q.scale.data, jnp.ones((), jnp.float32))
    return scaled_values(ScaledArray(q.data, inner, q.block)).astype(jnp.bfloat16), (outer,)
