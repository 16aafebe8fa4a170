"""Products of two `ScaledArray`s as each backend computes them. No choice is made here.

Every backend takes the same three arguments and gives the same numbers, up to the rounding of sums;
what it cannot do, its ``why_not`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import dot_in_chunks, multiply, scale_products, scale_shape_of, to_output
from jfp8.kernels import emulate, xla
from jfp8.matrices import free_dims
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.formats import E4M3FN, E5M2

HARDWARE_FORMATS = {E4M3FN, E5M2}


@dataclass(frozen=True)
class Job:
    """What is to be computed of two operands; see `scaled_matmul`.

    Attributes:
      dimension_numbers: checked.
      dtype: of the result.
      accumulation, fast_accumulation, powers_of_two: see `scaled_matmul`.
    """

    dimension_numbers: lax.DotDimensionNumbers
    dtype: np.dtype
    accumulation: str
    fast_accumulation: bool
    powers_of_two: bool


def emulated(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """In f32 arithmetic, on any device: the reference."""
    if job.accumulation != "f32":
        if varies_along_sum(lhs, rhs, job):
            product = dot_in_chunks(lhs, rhs, job.dimension_numbers, job.accumulation)
            return product.astype(job.dtype)
        one = jnp.ones((), jnp.float32)
        lhs_data, rhs_data = ScaledArray(lhs.data, one), ScaledArray(rhs.data, one)
        product = dot_in_chunks(lhs_data, rhs_data, job.dimension_numbers, job.accumulation)
    elif varies_along_sum(lhs, rhs, job):
        values = scaled_values(lhs), scaled_values(rhs)
        product = multiply(*values, job.dimension_numbers, lax.Precision.HIGHEST)
        return product.astype(job.dtype)
    else:
        product = emulate.dot_general(
            lhs.data, rhs.data, job.dimension_numbers, fast_accumulation=job.fast_accumulation
        )
    return xla.times(product, factors_of(lhs, rhs, job)).astype(job.dtype)


def f8_by_xla(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """f8 operands for XLA: FP8 tensor cores on CUDA."""
    return xla.scaled_dot_general(
        lhs.data,
        rhs.data,
        job.dimension_numbers,
        factors_of(lhs, rhs, job),
        job.dtype,
        fast_accumulation=job.fast_accumulation,
    )


def why_not_f8_by_xla(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> str | None:
    """What `f8_by_xla` cannot do, None if it can do it all."""
    if job.accumulation != "f32":
        return f"accumulation={job.accumulation!r}: it computes real products, not models of them"
    if not {lhs.format, rhs.format} <= HARDWARE_FORMATS:
        return f"operands in {lhs.format.name} and {rhs.format.name}"
    if varies_along_sum(lhs, rhs, job):
        return (
            "scales that vary along the contraction and so cannot leave the sum (lhs scale "
            f"{scale_shape_of(lhs)}, rhs scale {scale_shape_of(rhs)}, dimension_numbers "
            f"{job.dimension_numbers})"
        )
    return None


def in_bf16(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """bf16 tensor cores: for GPUs where FP8 is not to be had, or does not pay.

    What is stored in 8 bits is exact in bf16, also times a power of two. Other scales that vary
    along the sum take three bf16 products in the place of one, which lose nothing of note.
    """
    if not varies_along_sum(lhs, rhs, job):
        factors = factors_of(lhs, rhs, job)
        return xla.in_bf16(lhs.data, rhs.data, job.dimension_numbers, factors, job.dtype)
    (first, outer), (second, other) = _without_outer_scale(lhs), _without_outer_scale(rhs)
    factors = [factor for factor in (outer, other) if factor is not None]
    exact = job.powers_of_two or all(scale_dtype(q).itemsize == 1 for q in (lhs, rhs))
    if exact:
        a, b = (scaled_values(q).astype(jnp.bfloat16) for q in (first, second))
        y = multiply(a, b, job.dimension_numbers)
    else:
        three = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
        y = multiply(scaled_values(first), scaled_values(second), job.dimension_numbers, three)
    return xla.times(y, factors).astype(job.dtype)


def _without_outer_scale(q: ScaledArray) -> tuple[ScaledArray, jax.Array | None]:
    """`q` with its blocks' scales only, and what they are all to be multiplied by, if anything."""
    if not isinstance(q.scale, ScaledArray) or isinstance(q.scale.scale, ScaledArray):
        return q, None
    if jnp.ndim(q.scale.scale):
        return q, None
    one = jnp.ones((), jnp.float32)
    return ScaledArray(q.data, ScaledArray(q.scale.data, one), q.block), q.scale.scale


def scale_dtype(q: ScaledArray) -> np.dtype:
    """The dtype that the scales of blocks are stored in."""
    return np.dtype(q.scale.data.dtype if isinstance(q.scale, ScaledArray) else q.scale.dtype)


def varies_along_sum(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> bool:
    """Whether a scale of either operand cannot leave the sum."""
    (lhs_contract, rhs_contract), _ = job.dimension_numbers
    return _varies_along(lhs, lhs_contract) or _varies_along(rhs, rhs_contract)


def _varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)


def factors_of(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> list[jax.Array]:
    """What to multiply a product of the stored values by: scales that left the sum."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = job.dimension_numbers
    lhs_free = free_dims(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs.ndim, rhs_contract, rhs_batch)
    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    return scale_products(
        tuple(to_output(s, lhs, lhs_batch, lhs_free, 0, len(rhs_free)) for s in lhs_scales),
        tuple(to_output(s, rhs, rhs_batch, rhs_free, len(lhs_free), 0) for s in rhs_scales),
    )
