"""Operands and their scales in the shapes of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.spec import MatmulSpec, factors_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Tpu


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "carrier", "factor", "transposed"),
    meta_fields=("block",),
)
@dataclass(frozen=True, eq=False)
class Paired(ScaledArray):
    """A `ScaledArray` with what the kernel that quantized it has written besides, if anything.

    XLA would start a kernel for one number, and devices would send both matrices.
    """

    factor: jax.Array | None = None  # f32[], as by `scale_products` with the other operand's scale
    transposed: jax.Array | None = None  # the data


def to_last(x: jax.Array, axis: int) -> jax.Array:
    """Return `x` with its last two dimensions exchanged, unless `axis` is the last."""
    return x if axis == x.ndim - 1 else x.swapaxes(-1, -2)


def scales_by_block(
    scale: jax.Array, q: ScaledArray, batch: Sequence[int], units: dict[int, int]
) -> jax.Array:
    """Return ``[(batch,) ...]``: a scale for each of the `units` of elements, by dimension."""
    sizes = [-(-q.shape[d] // unit) for d, unit in units.items()]
    if scale.ndim:
        scale = scale.transpose(*batch, *units)
        for axis, (d, unit) in enumerate(units.items(), len(batch)):
            size = sizes[axis - len(batch)]
            if scale.shape[axis] != size:
                scale = jnp.repeat(scale, max(q.block_sizes()[d] // unit, 1), axis=axis)
                scale = lax.slice_in_dim(scale, 0, size, axis=axis)
    return jnp.broadcast_to(scale, (*(q.shape[d] for d in batch), *sizes))


def factors_by_kernels(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> list[jax.Array]:
    """Return `factors_of`, or the factor written by the kernel that quantized an operand."""
    for operand in (lhs, rhs):
        if isinstance(operand, Paired) and operand.factor is not None:
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
