"""Attention of f8 matrices on Hopper: the call of the kernel in `attention_block`, and its rule."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.kernels.hopper.attention_block import Problem, kernel, most_stages, scratch
from jfp8.kernels.hopper.attention_parts import BLOCK, COMPUTE, ROWS, heads_first, launch
from jfp8.kernels.hopper.mask_bits import packed
from jfp8.kernels.hopper.tiles import padded

SIZES = (64, 128, 256)  # of a head


def attention_forward(
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
    stages: int | None = None,
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
      q: ``f8[..., G, T, H]``, H of 64, 128 or 256.
      k: ``f8[..., G / groups, S, H]``.
      v_t: ``f8[..., G / groups, H, S]``.
      q_scale: ``f32[..., G, T]``. Positive, as the others.
      k_scale: ``f32[..., G / groups, S]``.
      v_scale: ``f32[..., G / groups, S]``, powers of two from 2^-90 to 2^100.
      key_lengths: ``i32[..., G / groups]``: key j is visible to query i only if ``j <
        key_lengths[g]``.
      mask: ``bool[... | 1, G | 1, T | 1, S | 1]``: only if it is True.
      groups: how many heads of queries share a head of keys and values.
      scale: of the logits, positive.
      is_causal: whether only if ``j <= i``.
      window: ``(left, right)``: only if ``i - left <= j <= i + right``. None: no such bound.
      out_dtype: f32, bf16 or f16, to which `o` is rounded once.
      stages: how many blocks of keys and values shared memory holds; None: as many as fit, up to 4.
      interpret: for ``plgpu.kernel``.

    Returns:
      ``out_dtype[..., G, T, H]`` and ``f32[..., G, T]``.

    Raises:
      ValueError: H is another, or `scale` is not positive, or `window` is negative.
    """
    shape, (*_, rows, size), keys = q.shape, q.shape, k.shape[-2]
    _check(size, scale, window)
    if 0 in (*shape, keys):
        return jnp.zeros(shape, out_dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    q, k, v_t = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v_t))
    q_scale, k_scale, v_scale = (x.reshape(-1, x.shape[-1]) for x in (q_scale, k_scale, v_scale))
    heads = q.shape[0]
    left, right = window or (None, None)
    if is_causal:
        right = 0
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
    if mask is not None:
        operands |= packed(mask.reshape(-1, *mask.shape[-3:]), (rows, keys), 3, BLOCK)
    problem = Problem(
        rows=operands["q"].shape[1],
        keys=keys,
        size=size,
        groups=groups,
        factor=scale * math.log2(math.e),
        left=left,
        right=right,
        stages=stages or most_stages(size, with_mask=mask is not None),
    )
    out_type = [
        jax.ShapeDtypeStruct((heads // shape[-3], problem.rows, shape[-3], size), out_dtype),
        jax.ShapeDtypeStruct((heads, problem.rows), jnp.float32),
    ]
    run = functools.partial(kernel, problem, tuple(operands))
    shared = scratch(problem, operands, out_dtype)
    blocks = heads // shape[-3], shape[-3] * problem.tiles
    o, lse = launch(run, "attention", blocks, operands, out_type, shared, interpret)
    return heads_first(o, shape), lse[:, :rows].reshape(shape[:-1])


def division(
    groups: int, *, key_lengths: jax.Array | None = None, mask: jax.Array | None = None
) -> str:
    """How devices may divide `attention_forward`: by sequences and heads, ``[B, N, T, H]``.

    A rule for `tracing.divided`, with as many dimensions and those of `key_lengths` and `mask` that
    are not None.
    """
    k = of_keys(groups)
    matrices, scales = ["b n T H", f"{k} S H", f"{k} H S"], ["b n T", f"{k} S", f"{k} S"]
    operands = [*matrices, *scales, *of_hidden(groups, key_lengths, mask)]
    return f"{', '.join(operands)} -> b n T H, b n T"


def of_keys(groups: int) -> str:
    """What `division` calls the heads of keys."""
    return "b n" if groups == 1 else f"b n/{groups}"


def of_hidden(groups: int, key_lengths: jax.Array | None, mask: jax.Array | None) -> list[str]:
    """What `division` calls the dimensions of what hides keys. Every device has those of 1."""
    names = [] if key_lengths is None else [of_keys(groups)]
    if mask is not None:
        each = zip("bnTS", ("B", "N", "Q", "K"), mask.shape, strict=True)
        names.append(" ".join(name if size > 1 else one for name, one, size in each))
    return names


def _check(size: int, scale: float, window: tuple[int, int] | None) -> None:
    if size not in SIZES:
        raise ValueError(
            f"the attention kernel takes heads of 64, 128 or 256 numbers, not {size}: "
            "pad queries, keys and values with zeros."
        )
    if not scale > 0:
        raise ValueError(
            f"scale={scale}: the attention kernel finds the largest logits before it multiplies by "
            "scale, which must be positive. For a negative one, negate the queries."
        )
    if window is not None and min(window) < 0:
        raise ValueError(f"window={window}: a query sees its own key; give no negative numbers.")
