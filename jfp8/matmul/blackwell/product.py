"""Products of MX operands, blocks of 32 with E8M0 scales, on Blackwell."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jfp8.matmul.backend import Backend
from jfp8.matmul.job import HARDWARE_FORMATS, Job, as_matrices, free_dims, layout_of, to_last
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E8M0FNU
from jfp8.tracing.context import Gpu, why_not_divided
from jfp8.tracing.divided import divided

BLOCK = 32


def _why_not_on(gpu: Gpu | None) -> str | None:
    if gpu is None:
        return None
    if gpu.capability is None or gpu.capability[0] != 10:
        return f"{gpu.kind}: block-scaled products are for Blackwell (compute capability 10.x)"
    return why_not_divided(gpu)


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
    product = divided(
        "scaled_matmul",
        lambda a, b, s, t: blackwell.scaled_matmul(a, b, s, t, job.dtype),
        f"m k, n k, m k/{BLOCK}, n k/{BLOCK} -> m n",
        combine="sum",
    )
    if lhs_batch:
        product = jax.vmap(product)
    y = product(a, b, *scales)
    return y.reshape(layout_of(lhs.shape, rhs.shape, job.dimension_numbers).shape)


def _by_row(q: ScaledArray, contract: int, batch: Sequence[int]) -> jax.Array:
    """The scales as e8m0[(batch,) rows, k / 32]."""
    (free,) = free_dims(q.ndim, (contract,), batch)
    scale = jnp.asarray(q.scale).transpose(*batch, free, contract)
    if scale.shape[-2] != q.shape[free]:
        scale = jnp.repeat(scale, BLOCK, axis=-2)[..., : q.shape[free], :]
    return scale


BACKEND = Backend(
    "cudnn",
    by_blackwell,
    formats=HARDWARE_FORMATS,
    granularities=frozenset({"blocks"}),
    blocks=frozenset({(BLOCK, 1), (BLOCK, BLOCK)}),
    scale_dtype=E8M0FNU.dtype,
    accumulations=("f32",),
    why_not_e5m2="no tensor core of Blackwell multiplies e5m2 by e5m2",
    gpus=10,
    why_not_on=_why_not_on,
)
