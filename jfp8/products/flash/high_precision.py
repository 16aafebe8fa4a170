"""Attention that is not quantized: ``jax.nn.dot_product_attention``, by cuDNN where that runs."""

from __future__ import annotations

from collections.abc import Callable
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
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of ``[batch, tokens, heads, depth]``; 0 for a query that sees no key.

    XLA has an array of all scores. The backward pass computes it again instead of keeping it.

    Args:
      implementation: ``"xla"`` or ``"cudnn"``; None: cuDNN where it computes this, else XLA.
      dropout_rate, dropout_key: drop this share of the weights, by this key; None drops none.
    """
    # JAX's attention drops no weights, and computes the softmax in float32.
    drops = dropout_key is not None and dropout_rate > 0
    if drops or v.dtype == jnp.float64:
        kept = partial(_kept, dropout_key, dropout_rate) if drops else lambda weights: weights
        return _attend_by_weights(q, k, v, visible, scale, kept)
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
    rows = visible.sizes[0]
    if implementation == "cudnn":
        q, k, v, visible = _even(q, k, v, visible)
    bias, mask, by_position = visible.bias, None, visible
    if visible.sinks is not None:
        k, v, bias, mask = _with_sinks(k, v, visible)
        by_position = Visible(visible.sizes, is_causal=False, window=None)
    elif visible.segments is not None or visible.mask is not None:
        mask = replace(visible, is_causal=False, window=None, lengths=(None, None)).whole()
    of_queries, of_keys = (None if n is None else n.astype(jnp.int32) for n in by_position.lengths)
    by_score = lambda x: jnp.broadcast_to(x := _by_head(x), (*x.shape[:2], rows, k.shape[1]))
    how: dict[str, Any] = {"scale": scale, "implementation": implementation}
    return jax.nn.dot_product_attention(
        *(q, k, v, *(None if x is None else by_score(x) for x in (bias, mask))),
        is_causal=by_position.is_causal,
        local_window_size=by_position.window,
        query_seq_lengths=of_queries,
        key_value_seq_lengths=of_keys,
        **how,
    )[:, :rows]


def _attend_by_weights(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    scale: float,
    kept: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Compute attention with an array of all weights, ``kept(softmax(q k^T scale + bias)) v``."""
    batch, queries, heads, depth = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(batch, queries, k.shape[2], -1, depth)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k, preferred_element_type=wide)
    scores /= wide.type(1 / scale)
    if visible.bias is not None:
        scores += visible.bias.astype(wide)
    seen = visible.whole()
    scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    if visible.sinks is not None:
        sinks = jnp.broadcast_to(visible.sinks[..., None].astype(wide), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], -1)
    weights = jnp.where(seen, jax.nn.softmax(scores)[..., : k.shape[1]], 0)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", kept(weights).astype(v.dtype), v)
    return out.reshape(batch, queries, heads, depth).astype(q.dtype)


def _kept(key: jax.Array, rate: float, weights: jax.Array) -> jax.Array:
    """Drop a share `rate` of the weights, as Flax's ``Dropout`` does."""
    if rate == 1:
        return jnp.zeros_like(weights)
    stays = jax.random.bernoulli(key, 1 - rate, weights.shape)
    return jnp.where(stays, weights / (1 - rate), jnp.zeros_like(weights))


def _even(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array, Visible]:
    """Return the arguments with even numbers of tokens: JAX differentiates cuDNN for no others."""
    if _has_array_of_scores(visible) or not any(n % 2 for n in visible.sizes):
        return q, k, v, visible
    whole = (jnp.full(len(q), n, jnp.int32) for n in visible.sizes)
    given = zip(visible.lengths, whole, strict=True)
    of_queries, of_keys = (all_of if length is None else length for length, all_of in given)
    q, k, v = (padded(x, 1, x.shape[1] + x.shape[1] % 2) for x in (q, k, v))
    return q, k, v, replace(visible, lengths=(of_queries, of_keys))


def _has_array_of_scores(visible: Visible) -> bool:
    """Return whether a mask or bias, also of segments, has an element for each score."""
    given = visible.mask, visible.segments, visible.bias
    return any(x is not None for x in given)


def _with_sinks(k: jax.Array, v: jax.Array, visible: Visible) -> tuple[jax.Array, ...]:
    """Return keys, values, bias and mask with one more key: a sink is its score, zeros its value.

    JAX knows no sinks. All queries see that key.
    """
    assert visible.sinks is not None
    bias = jnp.zeros((1,) * 5) if visible.bias is None else visible.bias
    keys, sinks = visible.sizes[1], visible.sinks[..., None]
    shape = jnp.broadcast_shapes(bias.shape[:-1], sinks.shape[:-1])
    both = [jnp.broadcast_to(x, (*shape, n)) for x, n in ((bias, keys), (sinks, 1))]
    k, v = (padded(x, 1, keys + 1) for x in (k, v))
    return k, v, jnp.concatenate(both, -1), padded(visible.whole(), 4, keys + 1, fill=True)


def _by_head(x: jax.Array) -> jax.Array:
    """Return ``[batch, heads, groups, ...]`` with the heads of queries in one dimension."""
    return x.reshape(len(x), -1, *x.shape[3:])


def _cudnn_computes(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> bool:
    """Return whether cuDNN computes this by the installed JAX on the GPU that JAX traces for."""
    depth, window = q.shape[-1], visible.window
    is_odd = any(n % 2 for n in visible.sizes)
    sees_later = window is not None and window[1] > 0 and not visible.is_causal
    if visible.sinks is not None or sees_later or (is_odd and _has_array_of_scores(visible)):
        return False
    is_narrow = q.dtype in (jnp.bfloat16, jnp.float16)
    has_size = depth % 8 == 0 and depth <= _largest_head(q, k, v)
    return is_narrow and has_size and cudnn_version() is not None


def _largest_head(*arrays: jax.Array) -> int:
    """Return the most numbers in a head for cuDNN on the GPU that JAX traces for; 0 without one."""
    gpu = current_gpu(*arrays)
    if gpu is None or not gpu.kind or gpu.capability is None or gpu.capability < (8, 0):
        return 0
    # Beyond 128, JAX asks the GPU that is there.
    return 256 if gpu.capability >= (9, 0) and jax.default_backend() == "gpu" else 128
