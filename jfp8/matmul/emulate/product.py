"""The reference product, to which every other backend is held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.backend import Backend
from jfp8.matmul.emulate.chunks import dot_in_chunks
from jfp8.matmul.emulate.f32_sums import dot_general
from jfp8.matmul.job import Job, factors_of, multiply, times, varies_along_sum
from jfp8.scaling.arrays import ScaledArray, scaled_values


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
        product = dot_general(
            lhs.data, rhs.data, job.dimension_numbers, fast_accumulation=job.fast_accumulation
        )
    return times(product, factors_of(lhs, rhs, job)).astype(job.dtype)


BACKEND = Backend("emulate", emulated)
