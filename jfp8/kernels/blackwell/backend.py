"""Matmuls of block-scaled operands by cuDNN, on the tensor cores of Blackwell.

The cores multiply MX operands: every 32 elements along the contraction share an E8M0 scale. A power
of two that more elements share, as in blocks of 1x128 and 128x128, is the scale of several such
blocks. They also multiply NVFP4 operands: every 16 elements share an E4M3 scale; the tensors'
scales multiply the sum. All terms are exact; only the order of f32 sums is the hardware's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.backend import Backend
from jfp8.kernels.operands import by_rows, scales_by_block
from jfp8.kernels.partitioning import why_not_divided
from jfp8.kernels.verdicts import why_failed
from jfp8.matmul.spec import (
    HARDWARE_FORMATS,
    MatmulSpec,
    free_dims,
    has_one_scale,
    scale_products,
    times,
)
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_to_format
from jfp8.scaling.formats import E2M1FN, E4M3FN, E8M0FNU, Format
from jfp8.tracing.devices import Gpu


class Kind(NamedTuple):
    """Describe the operands that the tensor cores take."""

    name: str
    data: np.dtype  # dtype of the values; MX operands may be e5m2, too
    scale: np.dtype
    block: int  # elements along the contraction that share a scale


MX = Kind("MX", E4M3FN.dtype, E8M0FNU.dtype, 32)
NVFP4 = Kind("NVFP4", E2M1FN.dtype, E4M3FN.dtype, 16)


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Compute ``y[i, j] = sum_t a_scale[i, t] b_scale[j, t] sum_{k in block t} a[i, k] b[j, k]``.

    For compute capability 10.x and, if cuDNN supports it, 12.x. On other devices the results are
    the same, but XLA writes the scaled operands to memory and multiplies them, slower than a
    matmul in bf16.

    Args:
      a, b: ``[M, K]`` and ``[N, K]``. MX: e4m3fn or e5m2, but not both e5m2. NVFP4: e2m1fn. If M or
        N is not a multiple of 128, XLA copies operands to pad them.
      a_scale, b_scale: ``[M, ceil(K/block)]`` and ``[N, ceil(K/block)]``. MX: e8m0, for blocks of
        32. NVFP4: e4m3fn, not negative, for blocks of 16.
    """
    kind = NVFP4 if a.dtype == NVFP4.data else MX
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    # JAX infers the block size from the shapes, which an incomplete block would change.
    a, b = (jnp.pad(x, ((0, 0), (0, -k % kind.block))) for x in (a, b))
    # With f16, XLA would scale the values in f16 on other devices.
    dtype = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32
    operands = (x[None] for x in (a, b, a_scale, b_scale))  # a batch of one matmul
    return jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)[0].astype(out_dtype)


def _why_not_on(task: str, major: int, gpu: Gpu | None) -> str | None:
    if gpu is None:
        return None
    if gpu.capability is None or gpu.capability[0] != major:
        return f"{gpu.kind}: block-scaled matmuls are for Blackwell (compute capability {major}.x)"
    return why_not_divided(gpu) or why_failed({task}, gpu)


def by_blackwell(kind: Kind, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Multiply operands of this `kind` with the block-scaled tensor cores."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = spec.dimension_numbers
    a_scale, of_lhs = scales_of_rows(kind, lhs, lhs_contract[0], lhs_batch)
    b_scale, of_rhs = scales_of_rows(kind, rhs, rhs_contract[0], rhs_batch)
    factors = scale_products(of_lhs, of_rhs)

    def product(dtype, a, b, a_scale, b_scale, *factors):
        y = scaled_matmul(a, b, a_scale, b_scale, np.float32 if factors else dtype)
        return times(y, factors).astype(dtype)

    rule = f"m k, n k, m k/{kind.block}, n k/{kind.block}{',' * len(factors)} -> m n"
    name, scales = f"scaled_matmul, {kind.name}", (a_scale, b_scale, *factors)
    return by_rows(lhs, rhs, spec, name, product, rule, scales)


def scales_of_rows(
    kind: Kind, q: ScaledArray, contract: int, batch: Sequence[int]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the scale of an operand for each row and block of the contraction, and the outer one.

    Returns:
      ``[(batch,) rows, ceil(k / kind.block)]`` in ``kind.scale``, and if the scales have two
      levels, the outer one, f32[], or f32[batch] if each matrix has its own. One scale for the
      whole operand is an outer one, and the scales of blocks are 1.
    """
    (free,) = free_dims(q.ndim, (contract,), batch)
    rows, blocks = q.shape[free], -(-q.shape[contract] // kind.block)
    sizes = [q.shape[d] for d in batch]
    if has_one_scale(q):
        return jnp.ones((*sizes, rows, blocks), kind.scale), (jnp.asarray(q.scale),)
    scale, outer = jnp.asarray(q.scale), ()
    if isinstance(q.scale, ScaledArray):
        scale, top = q.scale.data, jnp.asarray(q.scale.scale, jnp.float32)
        outer = (jnp.broadcast_to(top.reshape(-1), sizes) if top.ndim else top,)
    scale = as_e8m0(scale) if kind is MX else scale
    return scales_by_block(scale, q, batch, {free: 1, contract: kind.block}), outer


def as_e8m0(scale: jax.Array) -> jax.Array:
    """Return f32 scales as E8M0, exactly; E8M0 scales are unchanged.

    NaN if that is impossible: for all but positive, normal f32 numbers that are powers of two.
    All scales that jfp8 rounds to powers of two are. This detects a promise that does not hold.
    """
    if scale.dtype == E8M0FNU.dtype:
        return scale
    bits = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
    code, mantissa = bits >> 23, bits & np.uint32(0x7FFFFF)
    exact = (mantissa == 0) & (code >= 1) & (code <= 254)  # a sign makes the code larger
    return codes_to_format(jnp.where(exact, code, 255).astype(jnp.uint8), E8M0FNU)


def _backend(kind: Kind, formats: frozenset[Format], major: int = 10, **more: Any) -> Backend:
    task = f"{kind.name} products"
    options: dict[str, Any] = {
        "granularities": frozenset({"blocks"}),
        "blocks": frozenset({(kind.block, 1), (kind.block, kind.block)}),
        "multiples": True,
    }
    return Backend(
        "cudnn",
        partial(by_blackwell, kind),
        formats=formats,
        accumulations=("f32",),
        gpus=major,
        why_not_on=partial(_why_not_on, task, major),
        **options | more,
    )


_mx = partial(
    _backend,
    MX,
    HARDWARE_FORMATS,
    why_not_e5m2="no tensor core of Blackwell multiplies e5m2 by e5m2",
)
MX_BACKEND = _mx(powers_of_two=True)
NVFP4_BACKEND = _backend(NVFP4, frozenset({E2M1FN}), scale_dtype=NVFP4.scale)

# GeForce and RTX PRO (12.x). Their tensor cores multiply FP8 with f32 sums at half of the MX rate,
# so that operands with one scale use MX with 1 as the scale of each block. Only the card can say
# if cuDNN supports that matmul there.
_proven = {"major": 12, "proof": "MX products"}
_one = {"granularities": frozenset({"tensor"}), "first_for": frozenset({"tensor"})}
ON_GEFORCE = (_mx(powers_of_two=True, **_proven), _mx(**_proven, **_one))
