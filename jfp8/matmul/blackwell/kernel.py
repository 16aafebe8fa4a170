"""The product of MX operands on Blackwell: cuDNN's, scaled by the tensor cores themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 32  # elements along the contraction that share a scale
FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """``y[i, j] = sum_t a_scale[i, t] * b_scale[j, t] * sum_{k in block t} a[i, k] * b[j, k]``.

    For compute capability 10.x only. On other devices the numbers are the same, but XLA writes the
    scaled operands to memory and multiplies those, which is slower than a product in bf16.

    Args:
      a, b: ``f8[M, K]`` and ``f8[N, K]``, e4m3fn or e5m2, but not both e5m2. If M or N is not a
        multiple of 128, XLA copies operands to pad them.
      a_scale, b_scale: ``e8m0[M, ceil(K/32)]`` and ``e8m0[N, ceil(K/32)]``.
      out_dtype: f32, bf16 or f16.

    Returns:
      ``out_dtype[M, N]``.

    Raises:
      NotImplementedError: dtypes for which cuDNN has no such product; XLA would dequantize.
    """
    _check_dtypes(a, b, a_scale, b_scale, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    # JAX infers the block size from the shapes, which an incomplete block would change.
    a, b = (jnp.pad(x, ((0, 0), (0, -k % BLOCK))) for x in (a, b))
    # With f16, devices where XLA scales the values would do so in f16.
    dtype = jnp.float32 if out_dtype == jnp.float16 else out_dtype
    operands = (x[None] for x in (a, b, a_scale, b_scale))  # a batch of one product
    return jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)[0].astype(out_dtype)


def _check_dtypes(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    out_dtype: jax.typing.DTypeLike,
) -> None:
    """Raises NotImplementedError unless cuDNN multiplies these."""
    of_operands = f"operands in {a.dtype.name} and {b.dtype.name}"
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        raise NotImplementedError(
            f"{of_operands}: MX products on Blackwell take float8_e4m3fn and float8_e5m2."
        )
    if a.dtype == b.dtype == jnp.float8_e5m2:
        raise NotImplementedError(
            f"{of_operands}: cuDNN multiplies e5m2 only by e4m3fn; XLA would dequantize both."
        )
    if not a_scale.dtype == b_scale.dtype == jnp.float8_e8m0fnu:
        raise NotImplementedError(
            f"scales in {a_scale.dtype.name} and {b_scale.dtype.name}: MX products on Blackwell "
            "take float8_e8m0fnu, one scale for each 32 elements."
        )
    if out_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"a result in {jnp.dtype(out_dtype).name}: MX products on Blackwell give float32, "
            "bfloat16 and float16."
        )
