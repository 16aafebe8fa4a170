"""Operands and their scales in the shapes of kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.matmul.spec import MatmulSpec, factors_of, free_dims, to_output
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Tpu


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "carrier", "factor"),
    meta_fields=("block",),
)
@dataclass(frozen=True, eq=False)
class Paired(ScaledArray):
    """A `ScaledArray` whose scale is already multiplied by the other operand's.

    A kernel that quantizes an operand writes both. XLA would start a kernel for this one number.
    """

    factor: jax.Array = field(kw_only=True)  # f32[], as by `scale_products` of both scales


def to_last(x: jax.Array, axis: int) -> jax.Array:
    """Return `x` with its last two dimensions exchanged, unless `axis` is the last."""
    return x if axis == x.ndim - 1 else x.swapaxes(-1, -2)


def row_scales(q: ScaledArray, contract: Sequence[int], batch: Sequence[int]) -> jax.Array:
    """Return the scales as f32[], or one for each free index, f32[(batch,) free]."""
    scale = jnp.asarray(q.scale)
    if not scale.ndim:
        return scale
    free = free_dims(q.ndim, contract, batch)
    scale = to_output(scale, q, batch, free, 0, 0)
    scale = jnp.broadcast_to(scale, [q.shape[d] for d in (*batch, *free)])
    size = math.prod(q.shape[d] for d in free)
    return scale.reshape(-1, size) if batch else scale.reshape(size)


def factors_by_kernels(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> list[jax.Array]:
    """Return `factors_of`, or the factor written by the kernel that quantized an operand."""
    for operand in (lhs, rhs):
        if isinstance(operand, Paired):
            return [operand.factor]
    return factors_of(lhs, rhs, spec)


def dtype_of_partial_sums(spec: MatmulSpec) -> np.dtype:
    """Return the dtype of a matmul before it is scaled.

    TPUs over which the compiler shards arrays add partial sums in it: in f32 they would send
    twice the bytes.
    """
    divides = isinstance(spec.device, Tpu) and spec.device.divides
    sent = np.dtype(spec.partial_dtype or spec.dtype)
    return sent if divides and sent == jnp.bfloat16 else np.dtype(np.float32)
