"""Matmuls of MX and NVFP4 operands by cuDNN, scaled by Blackwell's tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Kind(NamedTuple):
    """Describe the operands that the tensor cores take."""

    name: str
    data: tuple[np.dtype, ...]  # dtypes of the values
    scale: np.dtype
    block: int  # elements along the contraction that share a scale


_E4M3, _E5M2, _E2M1, _E8M0 = map(
    np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu)
)
MX = Kind("MX", (_E4M3, _E5M2), _E8M0, 32)
NVFP4 = Kind("NVFP4", (_E2M1,), _E4M3, 16)


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
    kind = NVFP4 if a.dtype in NVFP4.data else MX
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    # JAX infers the block size from the shapes, which an incomplete block would change.
    a, b = (jnp.pad(x, ((0, 0), (0, -k % kind.block))) for x in (a, b))
    # With f16, XLA would scale the values in f16 on other devices.
    dtype = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32
    operands = (x[None] for x in (a, b, a_scale, b_scale))  # a batch of one matmul
    return jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)[0].astype(out_dtype)
