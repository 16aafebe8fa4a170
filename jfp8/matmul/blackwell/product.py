"""Products of operands in blocks, by the block-scaled tensor cores of Blackwell.

The cores multiply MX operands: each 32 elements along the sum share an E8M0 scale. A power of two
that more elements share, as in blocks of 1x128 and 128x128, is the scale of several such blocks. So
these products are exact in the same sense: only the order of f32 sums is the hardware's.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.backend import Backend
from jfp8.matmul.job import HARDWARE_FORMATS, Job, as_matrices, free_dims, layout_of, to_last
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import codes_to_format
from jfp8.scaling.formats import E8M0FNU
from jfp8.tracing.context import Gpu, why_not_divided
from jfp8.tracing.divided import divided_sum

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
        mx_scales(lhs, lhs_contract[0], lhs_batch),
        mx_scales(rhs, rhs_contract[0], rhs_batch),
    )
    product = divided_sum(
        "scaled_matmul",
        lambda dtype, a, b, s, t: blackwell.scaled_matmul(a, b, s, t, dtype),
        f"m k, n k, m k/{BLOCK}, n k/{BLOCK} -> m n",
        job.dtype,
        job.parts,
    )
    if lhs_batch:
        product = jax.vmap(product)
    y = product(a, b, *scales)
    return y.reshape(layout_of(lhs.shape, rhs.shape, job.dimension_numbers).shape)


def mx_scales(q: ScaledArray, contract: int, batch: Sequence[int]) -> jax.Array:
    """The scales of an operand, one for each row and each 32 elements along the sum.

    Args:
      q: a matrix, or a batch of them, with blocks that `BACKEND` takes, or one scale.
      contract: the dimension of the sum.
      batch: the dimension before the matrix, if there is one.

    Returns:
      ``e8m0[(batch,) rows, ceil(k / 32)]``.
    """
    (free,) = free_dims(q.ndim, (contract,), batch)
    rows, blocks = q.shape[free], -(-q.shape[contract] // BLOCK)
    scale = as_e8m0(jnp.asarray(q.scale))
    if scale.ndim:
        along, across = q.block_sizes()[contract], q.block_sizes()[free]
        scale = scale.transpose(*batch, free, contract)
        if scale.shape[-1] != blocks:
            scale = jnp.repeat(scale, along // BLOCK, axis=-1)[..., :blocks]
        if scale.shape[-2] != rows:
            scale = jnp.repeat(scale, across, axis=-2)[..., :rows, :]
    return jnp.broadcast_to(scale, (*(q.shape[d] for d in batch), rows, blocks))


def as_e8m0(scale: jax.Array) -> jax.Array:
    """Scales of f32 as E8M0, exactly; those that are E8M0 unchanged.

    NaN where that is not possible: for all but positive, normal f32 numbers that are powers of two.
    All scales that jfp8 rounds to powers of two are. A promise that does not hold is seen so.
    """
    if scale.dtype == E8M0FNU.dtype:
        return scale
    bits = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
    code, mantissa = bits >> 23, bits & np.uint32(0x7FFFFF)
    exact = (mantissa == 0) & (code >= 1) & (code <= 254)  # a sign makes the code larger
    return codes_to_format(jnp.where(exact, code, 255).astype(jnp.uint8), E8M0FNU)


BACKEND = Backend(
    "cudnn",
    by_blackwell,
    formats=HARDWARE_FORMATS,
    granularities=frozenset({"blocks"}),
    blocks=frozenset({(BLOCK, 1), (BLOCK, BLOCK)}),
    multiples=True,
    powers_of_two=True,
    accumulations=("f32",),
    why_not_e5m2="no tensor core of Blackwell multiplies e5m2 by e5m2",
    gpus=10,
    why_not_on=_why_not_on,
)
