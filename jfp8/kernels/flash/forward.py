"""Call the kernel of the forward pass of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfp8.kernels.flash.launch import launch, padded_operand
from jfp8.kernels.flash.mask_bits import packed
from jfp8.kernels.flash.problem import BLOCK, Problem, window_of
from jfp8.kernels.flash.query_tile import QueryTile
from jfp8.kernels.flash.ring import heads_first


def attention_forward(
    work: type[QueryTile],
    q: jax.Array,
    k: jax.Array,
    v_t: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    key_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    groups: int,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``o = softmax(scale * q k^T) v`` and the logarithm of the softmax's denominator.

    See `ForwardTile` for the equations. A row that sees no key gets ``o = 0`` and ``lse = -inf``.
    Keys that a row does not see do not change its bits, unless one of their values, or its scale,
    is Inf or NaN.

    Args:
      q: ``f8[..., G, T, H]``; see `pallas_attention` for the supported H and masks.
      k, v_t: ``f8[..., G / groups, S, H]`` and ``f8[..., G / groups, H, S]``.
      q_scale, k_scale: ``f32[..., G, T]`` and ``f32[..., G / groups, S]``, positive.
      v_scale: ``f32[..., G / groups, S]``, powers of two from 2^-90 to 2^100.
      key_lengths: ``i32[..., G / groups]``.
      mask: ``bool[... | 1, G | 1, T | 1, S | 1]``, True for visible keys.
      scale: of the logits, positive.
      window: ``(left, right)``: visible if ``i - left <= j <= i + right``. None for no bound.
      out_dtype: f32, bf16 or f16, to which `o` is rounded once.

    Returns:
      ``out_dtype[..., G, T, H]`` and ``f32[..., G, T]``.
    """
    shape, (*_, rows, size), keys = q.shape, q.shape, k.shape[-2]
    if 0 in (*shape, keys):
        return jnp.zeros(shape, out_dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    given = {"q": q, "k": k, "v_t": v_t} | scales
    operands = {name: padded_operand(name, x, work.tokens) for name, x in given.items()}
    if key_lengths is not None:
        operands["key_lengths"] = key_lengths.reshape(-1)
    if mask is not None:
        operands |= packed(mask, (rows, keys), 3, (work.tokens, BLOCK))
    bounds = window_of(is_causal, window)
    problem = Problem(operands["q"].shape[1], keys, size, groups, scale, *bounds)
    o, lse = launch(work, problem, operands, shape[-3], out_dtype)
    return heads_first(o, shape), lse[:, :rows].reshape(shape[:-1])
