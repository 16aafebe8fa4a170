"""f8 x f8 `dot_general`, for which XLA calls cuBLASLt's FP8 product on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.bf16 import exact_product
from jfp8.matmul.dimensions import as_matrices, matrix_sizes, out_shape
from jfp8.matmul.job import (
    HARDWARE_FORMATS,
    Job,
    factors_of,
    scale_shape_of,
    times,
    varies_along_sum,
)
from jfp8.scaling.arrays import ScaledArray


def f8_by_xla(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """f8 operands for XLA: FP8 tensor cores on CUDA."""
    return scaled_dot_general(
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


# What cuBLASLt wants all sizes of an FP8 product to be multiples of.
ALIGNMENT = 16


def scaled_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    factors: Sequence[jax.Array],
    dtype: np.dtype,
    *,
    fast_accumulation: bool,
) -> jax.Array:
    """``dot_general(lhs, rhs) * factors`` of two f8 arrays, in `dtype`.

    On CUDA the dot algorithm is named. Without one, XLA's GPU compiler is free to pick a kernel
    that always accumulates fast, and ignores ``precision``; other backends refuse the name.
    """

    def on_cuda(lhs, rhs, *factors):
        return cuda(
            lhs, rhs, dimension_numbers, factors, dtype, fast_accumulation=fast_accumulation
        )

    def elsewhere(lhs, rhs, *factors):
        return plain(lhs, rhs, dimension_numbers, factors, dtype)

    return lax.platform_dependent(lhs, rhs, *factors, cuda=on_cuda, default=elsewhere)


def plain(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    factors: Sequence[jax.Array],
    dtype: np.dtype,
) -> jax.Array:
    """The same with whatever way XLA has of multiplying f8 arrays on a device."""
    y = lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)
    return times(y, factors).astype(dtype)


def cuda(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    factors: Sequence[jax.Array],
    dtype: np.dtype,
    *,
    fast_accumulation: bool,
) -> jax.Array:
    """The same on CUDA: one call of cuBLASLt, which also scales by what is 0-d, and adds a bias.

    For that the product has to be asked for in the dtype of the result, its sizes have to be
    multiples of 16, and the scale has to be a single multiplication in that dtype. XLA takes the
    scale itself in f32: it removes roundings that are undone at once. A result in f16 could
    overflow before it is scaled, and is made in f32.

    No tensor core multiplies e5m2 by e5m2: these are multiplied in bf16, which is exact.
    """
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
        return exact_product(lhs, rhs, dimension_numbers, factors, dtype)
    preset = lax.DotAlgorithmPreset
    algorithm = (
        preset.ANY_F8_ANY_F8_F32_FAST_ACCUM if fast_accumulation else preset.ANY_F8_ANY_F8_F32
    )
    first = np.dtype(dtype if dtype == jnp.bfloat16 else np.float32)

    def scaled(lhs, rhs, dimension_numbers):
        y = lax.dot_general(
            lhs, rhs, dimension_numbers, precision=algorithm, preferred_element_type=first
        )
        for factor in factors:
            if not factor.ndim:
                y = y * factor.astype(first)
        return y

    y = aligned(lhs, rhs, dimension_numbers, scaled)
    return times(y, [f for f in factors if f.ndim]).astype(dtype)


def aligned(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    product: Callable[[jax.Array, jax.Array, lax.DotDimensionNumbers], jax.Array],
) -> jax.Array:
    """`product` of matrices whose sizes are multiples of 16, by zeros behind them if need be.

    XLA would pad as well, but then neither scale nor bias would be part of the product.
    """
    m, n, _ = sizes = matrix_sizes(lhs.shape, rhs.shape, dimension_numbers)
    if not any(size % ALIGNMENT for size in sizes):
        return product(lhs, rhs, dimension_numbers)
    shape = out_shape(lhs.shape, rhs.shape, dimension_numbers)
    lhs, rhs, dimension_numbers = as_matrices(lhs, rhs, dimension_numbers)
    lhs, rhs = _padded(lhs, dimension_numbers[1][0]), _padded(rhs, dimension_numbers[1][1])
    y = product(lhs, rhs, dimension_numbers)
    return lax.slice(y, [0] * y.ndim, [*y.shape[:-2], m, n]).reshape(shape)


def _padded(x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """`x` with zeros behind each dimension that is no batch dimension, to a multiple of 16."""
    return jnp.pad(x, [(0, 0 if d in batch else -n % ALIGNMENT) for d, n in enumerate(x.shape)])
