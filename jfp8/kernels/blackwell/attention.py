"""Attention of f8 matrices on Blackwell: the call of its kernel, and its rule."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.kernels.blackwell.attention_block import Problem, kernel, scratch
from jfp8.kernels.blackwell.attention_parts import ROWS
from jfp8.kernels.hopper.attention_parts import BLOCK, COMPUTE, heads_first, launch
from jfp8.kernels.hopper.tiles import padded


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v_t: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    groups: int,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    out_dtype: jax.typing.DTypeLike,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """``o = softmax(scale * q k^T) v`` and the logarithm of the softmax's denominator. ::

        s   = (q . k^T) * q_scale_i * (scale * log2(e)) * k_scale_j    -inf where invisible
        m'  = max(m, rowmax(s));  p = exp2(s - m');  a = exp2(m - m')
        l   = l * a + rowsum(p)
        b_i = max(v_scale_j)  over the block's keys j that are visible to i
        w   = e4m3fn(p * v_scale_j / b_i * 2^8)
        acc = acc * a + (w . v^T) * (b_i * 2^-8)

    for one block of 128 keys after another; then ``o = acc / l`` and ``lse = m * ln 2 + ln l``. All
    of it is f32, but for the products of f8 that the tensor cores sum. A row that sees no key gets
    ``o = 0`` and ``lse = -inf``. Keys that a row does not see do not change it by a bit, unless a
    value of theirs, or its scale, is Inf or NaN.

    Args:
      q: ``f8[..., G, T, H]``, H of 64 or 128.
      k: ``f8[..., G / groups, S, H]``.
      v_t: ``f8[..., G / groups, H, S]``.
      q_scale: ``f32[..., G, T]``, positive, as the others.
      k_scale: ``f32[..., G / groups, S]``.
      v_scale: ``f32[..., G / groups, S]``, powers of two from 2^-90 to 2^100.
      key_lengths: ``i32[..., G / groups]``: only if ``j < key_lengths[g]``.
      groups: how many heads of queries share a head of keys and values.
      scale: of the logits, positive: the largest ones are found before they are multiplied by it.
      is_causal: whether key j is visible to query i only if ``j <= i``.
      window: ``(left, right)``, not negative: only if ``i - left <= j <= i + right``. None: no
        such bound.
      out_dtype: f32, bf16 or f16, to which `o` is rounded once.
      interpret: for ``plgpu.kernel``.

    Returns:
      ``out_dtype[..., G, T, H]`` and ``f32[..., G, T]``.
    """
    shape, (*_, rows, size), keys = q.shape, q.shape, k.shape[-2]
    if 0 in (*shape, keys):
        return jnp.zeros(shape, out_dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    q, k, v_t = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v_t))
    q_scale, k_scale, v_scale = (x.reshape(-1, x.shape[-1]) for x in (q_scale, k_scale, v_scale))
    heads = q.shape[0]
    left, right = window or (None, None)
    operands = {
        "q": padded(q, 1, COMPUTE * ROWS, 1),
        "k": padded(k, 1, BLOCK, 1),
        "v_t": padded(v_t, 1, 1, BLOCK),
        "q_scale": padded(q_scale, 1, COMPUTE * ROWS),
        "k_scale": padded(k_scale, 1, BLOCK),
        "v_scale": padded(v_scale, 1, BLOCK),
    }
    if key_lengths is not None:
        operands["key_lengths"] = key_lengths.reshape(-1)
    problem = Problem(
        rows=operands["q"].shape[1],
        keys=keys,
        size=size,
        groups=groups,
        factor=scale * math.log2(math.e),
        left=left,
        right=0 if is_causal else right,
    )
    out_type = [
        jax.ShapeDtypeStruct((heads // shape[-3], problem.rows, shape[-3], size), out_dtype),
        jax.ShapeDtypeStruct((heads, problem.rows), jnp.float32),
    ]
    run = functools.partial(kernel, problem, tuple(operands))
    memory = scratch(problem, operands, out_dtype)
    blocks = heads // shape[-3], shape[-3] * problem.tiles
    o, lse = launch(run, "attention_blackwell", blocks, operands, out_type, memory, interpret)
    return heads_first(o, shape), lse[:, :rows].reshape(shape[:-1])
