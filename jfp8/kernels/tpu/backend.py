"""Matmuls of `ScaledArray`s on TPUs: by the Pallas kernel in this folder, or by XLA.

The kernel takes matrices in any layout. This file transforms any matmul into matrices, and scales
into the shapes of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.backend import (
    REFERENCE,
    Backend,
    Choice,
    Facts,
    check_not_refused,
    facts_of,
    first_that_can,
)
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.operands import scales_by_block
from jfp8.kernels.tpu.sharded import LANES
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.matmul.as_matrices import as_matrices, row_scales
from jfp8.matmul.known_scales import varies_along_sum
from jfp8.matmul.spec import HARDWARE_FORMATS, MatmulSpec, free_dims, layout_of
from jfp8.products.bias import plus_bias
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of
from jfp8.scaling.formats import E8M0FNU
from jfp8.tracing.devices import Gpu, Tpu
from jfp8.tracing.notes import note


def _why_not_on(device: Gpu | Tpu | None) -> str | None:
    if isinstance(device, Gpu):
        return f"{device.kind}: the Mosaic TPU kernels are for TPUs"
    if device is None or not device.divides:
        return None
    return (
        "arrays that the compiler shards over TPUs, since it cannot be told how to shard a kernel. "
        "Shard them over explicit axes, as jax.make_mesh makes them, in shards of multiples of "
        "128; or call it in a jax.shard_map over all axes of the mesh"
    )


def by_mosaic(
    lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec, bias: jax.Array | None = None
) -> jax.Array:
    """Multiply by the kernel on TPUs, or interpreted; elsewhere by the reference."""
    tpu = spec.device
    in_f8 = not isinstance(tpu, Tpu) or tpu.multiplies_f8
    kernel = lambda lhs, rhs, bias: _multiply(lhs, rhs, spec, in_f8, bias)
    reference = lambda lhs, rhs, bias: plus_bias(REFERENCE.multiply(lhs, rhs, spec), bias)
    return on_platform("tpu", kernel, spec.implementation or reference, lhs, rhs, bias)


def _multiply(
    lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec, in_f8: bool, given: jax.Array | None
) -> jax.Array:
    from jfp8.kernels.tpu.matmul import matmul

    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = spec.dimension_numbers
    layout = layout_of(lhs.shape, rhs.shape, spec.dimension_numbers)
    a, b, (((a_k,), (b_k,)), (batch, _)) = as_matrices(lhs.data, rhs.data, spec.dimension_numbers)
    m, n, k = layout.sizes
    in_blocks = varies_along_sum(lhs, rhs, spec)
    if in_blocks:
        in_f8 = False
        scales = (
            _block_scales(lhs, lhs_sum[0], lhs_batch),
            _block_scales(rhs, rhs_sum[0], rhs_batch),
        )
    else:
        u, v = row_scales(lhs, lhs_sum, lhs_batch), row_scales(rhs, rhs_sum, rhs_batch)
        scales = u[..., None] if u.ndim else u, v[..., None, :] if v.ndim else v
    # The kernel writes dtypes for which TPUs have registers.
    out = spec.dtype if spec.dtype in (jnp.float32, jnp.bfloat16) else np.dtype(np.float32)
    bias = None if given is None or out != spec.dtype else given.reshape(1, -1)

    # The compiler assumes the rate of bf16 when it schedules other work meanwhile.
    flops, summed = m * n * k * (1 if in_f8 else 2), (a_k - len(batch), b_k - len(batch))

    def product(a: jax.Array, b: jax.Array, *scales: Any) -> jax.Array:
        return matmul(a, b, summed, out, scales=scales, in_blocks=in_blocks, bias=bias, flops=flops)

    operands = (a, b, *scales)
    if batch:
        product = jax.vmap(product, in_axes=[0 if x.ndim > 2 else None for x in operands])
    y = product(*operands).astype(spec.dtype).reshape(layout.shape)
    return plus_bias(y, given if bias is None else None)


def _block_scales(q: ScaledArray, summed: int, batch: Sequence[int]) -> jax.Array:
    """Return scales as ``[(batch,) k / block, free]``, E8M0 scales as codes."""
    (free,), scale = free_dims(q.ndim, (summed,), batch), jnp.asarray(q.scale)
    scale = codes_of(scale) if scale.dtype == E8M0FNU.dtype else scale
    return scales_by_block(scale, q, batch, {summed: q.block_sizes()[summed], free: 1})


def _backend(**what: Any) -> Backend:
    return Backend(
        "mosaic_tpu",
        by_mosaic,
        formats=HARDWARE_FORMATS,
        accumulations=("f32", "f32_every_128"),  # both in f32: the order of sums is unspecified
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
# The first backend that supports the matmul is used.
BACKENDS = (BACKEND, BLOCK_BACKEND, f8_dot.BACKEND, bf16_dot.BACKEND, REFERENCE)


def multiply(
    lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec, bias: jax.Array | None = None
) -> jax.Array:
    """Return the matmul of two operands, plus a bias, by the named backend or the best one."""
    facts, tpu = facts_of(lhs, rhs, spec), spec.device
    if spec.implementation == BACKEND.name:
        named = BACKENDS[:2]
        backend = next((b for b in named if facts.granularity in b.granularities), named[0])
        check_not_refused(spec.implementation, backend.why_not(facts, tpu))
        text = BACKEND.name
    else:
        choice = choose_on_tpu(facts, tpu if isinstance(tpu, Tpu) else None)
        backend, text = choice.backend, str(choice)
    with note("tpu", text):
        if backend in BACKENDS[:2]:  # the kernel adds a bias by itself
            return by_mosaic(lhs, rhs, spec, bias)
        return plus_bias(backend.multiply(lhs, rhs, spec), bias)


def choose_on_tpu(facts: Facts, device: Tpu | None) -> Choice:
    """Return the backend for a matmul on a TPU; None for any matmul, by XLA.

    1. The Pallas kernel, which takes f8 codes with scales for tensors, rows and columns, and
       dequantizes blocks with powers of two to bf16 while it reads them.
    2. XLA: f8 arrays, which TPU7x multiplies, and others convert to bf16 first. Operands with
       scales that vary along the contraction, in bf16.
    """
    facts = replace(facts, accumulation="f32")
    kernels, others = BACKENDS[:2] if device is not None else (), BACKENDS[2:]
    # One kernel, which takes blocks of scales in another layout.
    kernels = [b for b in kernels if facts.granularity in b.granularities]
    return first_that_can(((b, b.why_not(facts, device)) for b in (*kernels, *others)), {})
