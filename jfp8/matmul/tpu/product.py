"""Products of `ScaledArray`s by the Pallas kernel for TPUs, in this folder.

The kernel takes matrices in any layout. This file brings any product into matrices, and scales into
the shapes that the kernel takes. Where the compiler divides arrays, parts that the kernel does not
take are multiplied by XLA, in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.backend import Backend
from jfp8.matmul.job import (
    HARDWARE_FORMATS,
    Job,
    as_matrices,
    free_dims,
    layout_of,
    row_scales,
    scale_products,
    times,
    varies_along_sum,
)
from jfp8.matmul.tpu.tiles import LANES, dequantized
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import codes_of
from jfp8.scaling.formats import E8M0FNU
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.context import Gpu, Tpu, current_tpu, why_not_divided
from jfp8.tracing.divided import divided_sum
from jfp8.tracing.refusal import only_on


def _why_not_on(device: Gpu | Tpu | None) -> str | None:
    if isinstance(device, Gpu):
        return f"{device.kind}: the Mosaic TPU kernels are for TPUs"
    return None if device is None else why_not_divided(device)


def by_mosaic(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """The product by the kernel on TPUs, or interpreted; an error on other platforms."""
    tpu = job.tpu or current_tpu(lhs.data, rhs.data)
    function = _in_blocks if varies_along_sum(lhs, rhs, job) else _scaled_after

    def kernel(lhs: ScaledArray, rhs: ScaledArray) -> jax.Array:
        return function(tpu, lhs, rhs, job)

    if kernels_are_interpreted():
        return kernel(lhs, rhs)
    reason = (
        "implementation='mosaic_tpu' runs on TPUs, and this program is compiled for another "
        "platform. Use implementation=None or 'emulate', which give the same numbers."
    )
    return only_on("tpu", kernel, reason, lhs, rhs)


def _scaled_after(tpu: Tpu | None, lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """With scales of tensors, rows and columns, by which the sum is multiplied."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = job.dimension_numbers
    u, v = row_scales(lhs, lhs_sum, lhs_batch), row_scales(rhs, rhs_sum, rhs_batch)
    ends = (u[..., None] if u.ndim else u, v[..., None, :] if v.ndim else v)
    in_f8 = tpu is None or tpu.multiplies_f8

    def product(summed, dtype, a, b, *ends, bias=None):
        return _whole(summed, dtype, a, b, ends=ends, bias=bias, in_f8=in_f8)

    of_ends = ["m ONE" if u.ndim else "", "ONE n" if v.ndim else ""]
    return _divided(f"matmul_tpu, {in_f8}", product, of_ends, ends, lhs, rhs, job)


def _in_blocks(tpu: Tpu | None, lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """With scales of blocks of terms."""
    del tpu
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = job.dimension_numbers
    a_scale, a_block = _block_scales(lhs, lhs_sum[0], lhs_batch)
    b_scale, b_block = _block_scales(rhs, rhs_sum[0], rhs_batch)

    def product(summed, dtype, a, b, *blocks, bias=None):
        return _whole(summed, dtype, a, b, blocks=blocks, bias=bias)

    dims = [f"k/{a_block} m", f"k/{b_block} n"]
    return _divided("matmul_tpu_in_blocks", product, dims, (a_scale, b_scale), lhs, rhs, job)


def _divided(
    name: str,
    product: Callable[..., jax.Array],
    dims: Sequence[str],
    scales: Sequence[jax.Array],
    lhs: ScaledArray,
    rhs: ScaledArray,
    job: Job,
) -> jax.Array:
    """``product(summed, dtype, a, b, *scales)`` of matrices, which the compiler may divide."""
    a, b, (((a_k,), (b_k,)), (batch, _)) = as_matrices(lhs.data, rhs.data, job.dimension_numbers)
    summed = a_k - len(batch), b_k - len(batch)
    if job.bias is not None:
        dims, scales = [*dims, "ONE n"], [*scales, job.bias.reshape(1, -1)]
        product = partial(_with_bias, product)
    of_data = ["m k" if summed[0] else "k m", "n k" if summed[1] else "k n"]
    rule = f"{', '.join([*of_data, *dims])} -> m n"
    multiply = divided_sum(
        f"{name}, {summed}", partial(product, summed), rule, job.dtype, job.parts
    )
    operands = (a, b, *scales)
    if batch:
        multiply = jax.vmap(multiply, in_axes=[0 if x.ndim > 2 else None for x in operands])
    y = multiply(*operands)
    return y.reshape(layout_of(lhs.shape, rhs.shape, job.dimension_numbers).shape)


def _with_bias(
    product: Callable[..., jax.Array],
    summed: tuple[int, int],
    dtype: np.dtype,
    *operands: jax.Array,
) -> jax.Array:
    """`product`, whose last operand is a bias."""
    return product(summed, dtype, *operands[:-1], bias=operands[-1])


def _whole(
    summed: tuple[int, int],
    dtype: np.dtype,
    a: jax.Array,
    b: jax.Array,
    ends: Sequence[jax.Array] | None = None,
    blocks: Sequence[jax.Array] | None = None,
    bias: jax.Array | None = None,
    in_f8: bool = False,
) -> jax.Array:
    """By the kernel, if the sizes are those that it takes; else by XLA, in bf16."""
    m, n, k = a.shape[1 - summed[0]], b.shape[1 - summed[1]], a.shape[summed[0]]
    if not any(size % LANES for size in (m, n, k)):
        from jfp8.matmul.tpu.kernel import matmul

        out = dtype if dtype in (jnp.float32, jnp.bfloat16) else np.dtype(np.float32)
        # The compiler counts with one rate, that of bf16, when it decides what to do meanwhile.
        flops = m * n * k * (1 if in_f8 else 2)
        how = {"ends": ends, "blocks": blocks, "flops": flops}
        if out != dtype:  # which the bias has
            return _plus(matmul(a, b, summed, out, **how).astype(dtype), bias)
        return matmul(a, b, summed, out, bias=bias, **how)
    a, b = (
        x.astype(jnp.bfloat16) if blocks is None else dequantized(x, blocks[i], summed[i])
        for i, x in enumerate((a, b))
    )
    numbers = (((summed[0],), (summed[1],)), ((), ()))
    y = lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)
    factors = () if ends is None else scale_products((ends[0],), (ends[1],))
    return _plus(times(y, factors).astype(dtype), bias)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias


def _block_scales(q: ScaledArray, summed: int, batch: Sequence[int]) -> tuple[jax.Array, int]:
    """Scales as ``[(batch,) k / block, free]``, E8M0 ones as codes, and the block."""
    (free,) = free_dims(q.ndim, (summed,), batch)
    scale, blocks = jnp.asarray(q.scale), q.block_sizes()
    scale = codes_of(scale) if scale.dtype == E8M0FNU.dtype else scale
    scale = scale.transpose(*batch, summed, free)
    if scale.shape[-1] != q.shape[free]:
        scale = jnp.repeat(scale, blocks[free], axis=-1)
    return scale, blocks[summed]


def _backend(**what: Any) -> Backend:
    return Backend(
        "mosaic_tpu",
        by_mosaic,
        formats=HARDWARE_FORMATS,
        accumulations=("f32", "f32_every_128"),  # both in f32: the order of sums is open
        multiples_of=LANES,
        why_not_on=_why_not_on,
        **what,
    )


BACKEND = _backend(granularities=frozenset({"tensor", "rows"}), scale_dtype=np.float32)
BLOCK_BACKEND = _backend(
    granularities=frozenset({"blocks"}),
    blocks=frozenset({(128, 1), (128, 128), (32, 1), (32, 32)}),
    powers_of_two=True,
)
