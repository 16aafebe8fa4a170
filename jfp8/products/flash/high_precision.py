"""Attention that is not quantized: ``jax.nn.dot_product_attention``, by cuDNN where that runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.products.flash.mask import Visible, padded
from jfp8.tracing.compat import cudnn_version
from jfp8.tracing.device import current_gpu


def attend_in_high_precision(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Compute attention of ``[batch, tokens, heads, depth]``; 0 for a query that sees no key.

    XLA has an array of all scores. The backward pass computes it again instead of keeping it.

    Args:
      implementation: ``"xla"`` or ``"cudnn"``; None: cuDNN where it computes this, else XLA.
    """
    dtype, common = q.dtype, jnp.result_type(q, k, v)
    q, k, v = (x.astype(common) for x in (q, k, v))
    if implementation is None:
        implementation = "cudnn" if _cudnn_computes(q, k, v, visible) else "xla"
    attend = partial(_attend, scale=scale, implementation=implementation)
    out = (attend if implementation == "cudnn" else jax.checkpoint(attend))(q, k, v, visible)
    if visible.may_hide_all_keys:
        seen = jnp.any(_by_head(visible.whole()), axis=-1)  # [batch | 1, heads | 1, queries]
        out = jnp.where(seen.swapaxes(1, 2)[..., None], out, 0)
    return out.astype(dtype)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, scale: float, implementation: str
) -> jax.Array:
    rows, keys = visible.sizes
    lengths = visible.lengths
    if implementation == "cudnn" and (rows % 2 or keys % 2):
        # JAX differentiates cuDNN's attention for even numbers of tokens only.
        whole = (jnp.full(len(q), n, jnp.int32) for n in visible.sizes)
        lengths = [n if given is None else given for given, n in zip(lengths, whole, strict=True)]
        q, k, v = (padded(x, 1, x.shape[1] + x.shape[1] % 2) for x in (q, k, v))
    options: dict[str, Any] = {
        "is_causal": visible.is_causal,
        "local_window_size": visible.window,
        "query_seq_lengths": lengths[0],
        "key_value_seq_lengths": lengths[1],
    }
    bias, mask, by_mask = visible.bias, None, visible
    if visible.sinks is None:
        by_mask = replace(visible, is_causal=False, window=None, lengths=(None, None))
    if visible.sinks is not None or visible.segments is not None or visible.mask is not None:
        mask = by_mask.whole()
    if visible.sinks is not None and mask is not None:
        # One more key, which all queries see, has the sink as its score, and zeros as its value.
        k, v = (padded(x, 1, keys + 1) for x in (k, v))
        mask, options = padded(mask, 4, keys + 1, fill=True), {}
        bias = _with_sinks(bias, visible.sinks, keys)
    by_score = lambda x: jnp.broadcast_to(x := _by_head(x), (*x.shape[:2], rows, k.shape[1]))
    bias, mask = (None if x is None else by_score(x) for x in (bias, mask))
    how: dict[str, Any] = {"scale": scale, "implementation": implementation, **options}
    return jax.nn.dot_product_attention(q, k, v, bias, mask, **how)[:, :rows]


def _with_sinks(bias: jax.Array | None, sinks: jax.Array, keys: int) -> jax.Array:
    """Return the bias of `keys` keys and, behind them, of one that stands for the sinks."""
    bias = jnp.zeros((1,) * 5) if bias is None else bias
    shape = jnp.broadcast_shapes(bias.shape[:-1], sinks.shape)
    of_keys, of_sinks = ((bias, keys), (sinks[..., None], 1))
    both = [jnp.broadcast_to(x, (*shape, n)) for x, n in (of_keys, of_sinks)]
    return jnp.concatenate(both, -1)


def _by_head(x: jax.Array) -> jax.Array:
    """Return ``[batch, heads, groups, ...]`` with the heads of queries in one dimension."""
    return x.reshape(len(x), -1, *x.shape[3:])


def _cudnn_computes(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> bool:
    """Return whether cuDNN computes this by the installed JAX on the GPU that JAX traces for."""
    gpu, depth = current_gpu(q, k, v), q.shape[-1]
    if gpu is None or not gpu.kind or gpu.capability is None or gpu.capability < (8, 0):
        return False
    largest = 256 if gpu.capability >= (9, 0) else 128
    if depth > 128 and jax.default_backend() != "gpu":  # JAX asks the GPU that is there
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float16) or depth % 8 or depth > largest:
        return False
    if visible.sinks is not None:
        return False
    if visible.window is not None and visible.window[1] and not visible.is_causal:
        return False
    by_score = visible.mask, visible.segments, visible.bias
    is_odd = any(n % 2 for n in visible.sizes)
    if is_odd and any(x is not None for x in by_score):
        return False
    return cudnn_version() is not None
