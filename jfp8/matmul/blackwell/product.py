"""Products of MX operands, blocks of 32 with E8M0 scales, on Blackwell."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jfp8.matmul.dimensions import as_matrices, free_dims, out_shape, to_last
from jfp8.matmul.job import HARDWARE_FORMATS, Job, scale_dtype, scale_shape_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E5M2, E8M0FNU
from jfp8.tracing.device import Gpu

BLOCK = 32


def why_not_blackwell(lhs: ScaledArray, rhs: ScaledArray, job: Job, gpu: Gpu) -> str | None:
    """What `by_blackwell` cannot do on `gpu`, None if it can do it all."""
    if gpu.capability is None or gpu.capability[0] != 10 or not gpu.whole:
        return f"{gpu.kind}: block-scaled products are for one Blackwell GPU at a time"
    if not {lhs.format, rhs.format} <= HARDWARE_FORMATS:
        return f"operands in {lhs.format.name} and {rhs.format.name}"
    if lhs.format == rhs.format == E5M2:
        return "e5m2 by e5m2, which no tensor core multiplies"
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = job.dimension_numbers
    for q, contract, batch in ((lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch)):
        if not _is_mx(q, contract, batch):
            return f"scales in other blocks than 1x32 ({scale_shape_of(q)} for {q.shape})"
    return None


def _is_mx(q: ScaledArray, contract: Sequence[int], batch: Sequence[int]) -> bool:
    if len(contract) != 1 or len(batch) > 1 or q.ndim != len(batch) + 2:
        return False
    if not scale_shape_of(q) or isinstance(q.scale, ScaledArray) or scale_dtype(q) != E8M0FNU.dtype:
        return False
    (free,) = free_dims(q.ndim, contract, batch)
    return q.block_sizes()[contract[0]] == BLOCK and q.block_sizes()[free] in (1, BLOCK)


def by_blackwell(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """The product by the block-scaled tensor cores."""
    from jfp8.matmul.blackwell import kernel as blackwell

    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = job.dimension_numbers
    a, b, numbers = as_matrices(lhs.data, rhs.data, job.dimension_numbers)
    a, b = (to_last(x, k) for x, (k,) in zip((a, b), numbers[0], strict=True))
    scales = (
        _by_row(lhs, lhs_contract[0], lhs_batch),
        _by_row(rhs, rhs_contract[0], rhs_batch),
    )
    product = lambda a, b, s, t: blackwell.scaled_matmul(a, b, s, t, job.dtype)
    if lhs_batch:
        product = jax.vmap(product)
    y = product(a, b, *scales)
    return y.reshape(out_shape(lhs.shape, rhs.shape, job.dimension_numbers))


def _by_row(q: ScaledArray, contract: int, batch: Sequence[int]) -> jax.Array:
    """The scales as e8m0[(batch,) rows, k / 32]."""
    (free,) = free_dims(q.ndim, (contract,), batch)
    scale = jnp.asarray(q.scale).transpose(*batch, free, contract)
    if scale.shape[-2] != q.shape[free]:
        scale = jnp.repeat(scale, BLOCK, axis=-2)[..., : q.shape[free], :]
    return scale
