"""Attention over blocks of queries and keys, with a running softmax.

    S = (Q K^T) scale + bias,   P = softmax(S),   O = P V

Forward, for each block of queries, over the blocks of keys that it sees (Milakov, Gimelshein,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691)::

    s  = (q . k^T) q_scale_i k_scale_j scale + bias        f32; -inf where query i may not see key j
    m' = max(m, max_j s)     p = exp(s - m')     a = exp(m - m')
    l  = l a + sum_j p
    b_i = max of v_scale_j over the keys of the block that query i sees
    w  = cast(p (v_scale_j / b_i) c)                        c = 256 for e4m3: p is at most 1
    o  = o a + (w . v) b_i / c

and ``O = o / l``, or ``o / (l + exp(sink - m))`` in a head with a sink. The scale of each key's
values goes into the weights, whose zeros hide what a query may not see. Backward, with
``p = exp(s - m)`` and ``g = 1 / l``, with the sink in ``l``, rounded anew for each sum with the
scales of what it meets. Neither ``m + log l`` nor ``p g`` is stored: f32 has no room for ``log l``
next to scores of -1e9, nor e4m3 for weights of many keys::

    dV = P^T dO      w = cast(p (g_i dO_scale_i / max_i) c),  max_i over the queries of the block
                                                              that see the key
    dP = dO V^T      dS = p g (dP - sum_h dO O)
    dQ = dS K scale  cast(dS k_scale_j / r_i),  r_i = max_j |dS k_scale_j| / fmt.max, rounded up to
                                                a power of two
    dK = dS^T Q scale  the same, with the scales of queries, for each key and head of queries
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.products.flash.mask import Visible, padded
from jfp8.products.flash.numerics import (
    Numerics,
    Quantized,
    product,
    quantize_made,
    weights_factor,
)
from jfp8.products.flash.observe import shown_block
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import SMALLEST_SCALE
from jfp8.tracing.compat import same_varying_axes


class Softmax(NamedTuple):
    """The result of the forward pass, ``[batch, heads, groups, queries, ...]``, f32."""

    out: jax.Array  # O
    largest: jax.Array  # ``m``, the largest score; -inf for a query without keys
    share: jax.Array  # ``1 / l``, so that ``P = exp(S - m) / l``; 0 for a query without keys


class Gradients(NamedTuple):
    """With respect to the operands, f32, shaped like them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    largest: jax.Array  # f32[], ``max(|dS|)``


class How(NamedTuple):
    """Hold what is known of attention in FP8 while JAX traces, besides shapes."""

    numerics: Numerics
    scale: float  # factor on the scores


def forward(how: How, q: Quantized, k: Quantized, v: Quantized, visible: Visible) -> Softmax:
    """Compute attention block by block.

    Args:
      q: ``[batch, heads, groups, queries, depth]``; those of a group share the keys of a head.
      k, v: ``[batch, heads, keys, depth]``.
    """
    (fmt, _), (size, of_keys) = how.numerics.weights, visible.block
    factor, rows = weights_factor(fmt), q.data.shape[3]
    q, k, v = _whole(q, 3, size), _whole(k, 2, of_keys), _whole(v, 2, of_keys)

    def of_block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_i = _block(q, i, size, 3)

        def add(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, l, o = carry
            k_j, v_j = (_block(x, j, of_keys, 2) for x in (k, v))
            s, seen = _scores(q_i, k_j, visible, how.scale, i, j)
            largest = jnp.maximum(m, jnp.max(s, axis=-1))
            p = jnp.exp(s - _finite(largest)[..., None])
            before = jnp.exp(m - _finite(largest))
            by_value = jnp.where(seen, _by_key(v_j.scale), 0)
            of_row = jnp.max(by_value, axis=-1, keepdims=True)
            of_row = jnp.where(of_row == 0, 1, of_row)
            w = _rounded("fprop", p * (by_value / of_row), fmt)
            y = product("bngts,bnsh->bngth", w, v_j.data) * (of_row / factor)
            return largest, l * before + jnp.sum(p, axis=-1), o * before[..., None] + y

        zeros = jnp.zeros(q_i.data.shape, jnp.float32)
        start = jnp.full(q_i.scale.shape, -jnp.inf), jnp.zeros_like(q_i.scale), zeros
        m, l, o = lax.fori_loop(*visible.keys_of(i), add, _varying(start, q_i))
        whole = jnp.where(l == 0, 1, l)
        return o / whole[..., None], m, jnp.where(l == 0, 0, 1 / whole)

    found = lax.map(of_block, jnp.arange(visible.blocks[0]))
    return _with_sinks(Softmax(*(_joined(x, rows) for x in found)), visible.sinks)


def _with_sinks(found: Softmax, sinks: jax.Array | None) -> Softmax:
    """Return `found` with ``exp(sink)`` added to the denominator of each head's softmax."""
    if sinks is None:
        return found
    seen = found.share > 0
    of_keys = jnp.where(seen, jax.nn.sigmoid(-_above_keys(found, sinks)), 0)
    return Softmax(found.out * of_keys[..., None], found.largest, found.share * of_keys)


def gradients_of_sinks(found: Softmax, sinks: jax.Array, dot: jax.Array) -> jax.Array:
    """Return the gradient of `sinks`, which are in `found`; `dot` is ``sum_h dO O``."""
    p = jnp.where(found.share > 0, jnp.exp(_above_keys(found, sinks)), 0)
    return -jnp.sum(p * dot, axis=(0, 3), keepdims=True)


def _above_keys(found: Softmax, sinks: jax.Array) -> jax.Array:
    """Return ``sink - m - log l``."""
    return (sinks - found.largest) + jnp.log(found.share)


class Both(NamedTuple):
    """The stored operands, each as its two products take it."""

    query: tuple[Quantized, Quantized]
    key: tuple[Quantized, Quantized]
    value: tuple[Quantized, Quantized]
    grad: tuple[Quantized, Quantized]


def backward(
    how: How, operands: Both, found: Softmax, dot: jax.Array, visible: Visible
) -> Gradients:
    """Compute all gradients from the result of `forward`, and from ``dot = sum_h dO O``."""
    numerics, scale = how
    (_, fmt), (size, of_keys) = numerics.weights, visible.block
    factor = weights_factor(fmt)
    for_dq, for_dk = numerics.scores
    rows, keys = operands.query[0].data.shape[3], operands.key[0].data.shape[2]
    of_s, of_dp = ([_whole(x, 3, size) for x in both] for both in (operands.query, operands.grad))
    (k_of_s, k_of_dq), (_, v) = (
        [_whole(x, 2, of_keys) for x in both] for both in (operands.key, operands.value)
    )
    by_query = [padded(x, 3, visible.blocks[0] * size) for x in (*found[1:], dot)]

    def of_block(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
        (q_i, q_of_dk), (g_of_dp, g_of_dv) = (
            [_block(x, i, size, 3) for x in both] for both in (of_s, of_dp)
        )
        largest_i, share, dot_i = (
            lax.dynamic_slice_in_dim(x, i * size, size, 3)[..., None] for x in by_query
        )
        by_grad = g_of_dv.scale[..., None] * share

        def add(j: jax.Array, carry: tuple) -> tuple:
            dq, dk, dv, dbias, largest = carry
            k_j, of_dq, v_j = (_block(x, j, of_keys, 2) for x in (k_of_s, k_of_dq, v))
            s, seen = _scores(q_i, k_j, visible, scale, i, j)
            p = jnp.exp(s - _finite(largest_i))
            of_key = _largest_seen(by_grad, seen)
            w = _rounded("wgrad", p * (by_grad / of_key), fmt)
            y = product("bngts,bngth->bngsh", w, g_of_dv.data) * (of_key.swapaxes(3, 4) / factor)
            dv = _added(dv, jnp.sum(y, 2), j * of_keys, 2)
            dp = product("bngth,bnsh->bngts", g_of_dp.data, v_j.data)
            dp = dp * g_of_dp.scale[..., None] * _by_key(v_j.scale)
            ds = p * share * (dp - dot_i)
            w, r = _quantized("dgrad", ds * _by_key(of_dq.scale), for_dq, 4)
            dq += product("bngts,bnsh->bngth", w, of_dq.data) * r
            w, r = _quantized("wgrad", ds * q_of_dk.scale[..., None], for_dk, 3)
            y = product("bngts,bngth->bngsh", w, q_of_dk.data) * r.swapaxes(3, 4)
            dk = _added(dk, jnp.sum(y, 2), j * of_keys, 2)
            dbias = _with_block(dbias, ds, (i * size, j * of_keys))
            return dq, dk, dv, dbias, jnp.maximum(largest, jnp.max(jnp.abs(ds)))

        zeros = _varying(jnp.zeros(q_i.data.shape, jnp.float32), q_i)
        dq, *sums = lax.fori_loop(*visible.keys_of(i), add, (zeros, *carry))
        return tuple(sums), dq

    zeros = jnp.zeros(k_of_s.data.shape, jnp.float32)
    dbias = None if visible.bias is None else jnp.zeros(visible.padded_bias(), jnp.float32)
    start = _varying((zeros, zeros, dbias, jnp.zeros(())), k_of_s)
    (dk, dv, dbias, largest), dq = lax.scan(of_block, start, jnp.arange(visible.blocks[0]))
    if dbias is not None and (bias := visible.bias) is not None:
        dbias = lax.slice(dbias, [0] * 5, bias.shape).astype(bias.dtype)
    dk, dv = dk[:, :, :keys] * scale, dv[:, :, :keys]
    return Gradients(_joined(dq, rows) * scale, dk, dv, dbias, largest)


def _varying(start: Any, like: Quantized) -> Any:
    """`start` of a loop, which ``shard_map`` wants to vary over the devices as its results do."""
    return same_varying_axes((start, like.data))[0]


def _scores(
    q: Quantized, k: Quantized, visible: Visible, scale: float, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``S`` of a block of queries and one of keys, -inf where the second result is False."""
    s = product("bngth,bnsh->bngts", q.data, k.data)
    s = s * (q.scale * scale)[..., None] * _by_key(k.scale)
    if visible.bias is not None:
        s = s + visible.part(visible.bias, i, j, fill=0).astype(jnp.float32)
    seen = visible.of_block(i, j)
    return jnp.where(seen, s, -jnp.inf), seen


def _largest_seen(by_query: jax.Array, seen: jax.Array) -> jax.Array:
    """Return the largest number of the queries that see a key, or 1."""
    largest = jnp.max(jnp.where(seen, by_query, 0), axis=3, keepdims=True)
    return jnp.where(largest == 0, 1, largest)


def _rounded(kind: str, weights: jax.Array, fmt: Format | None) -> jax.Array:
    if fmt is None:
        return weights
    factor = weights_factor(fmt)
    data, scale = cast(weights * factor, fmt), jnp.float32(1 / factor)
    return shown_block("context", "lhs", kind, fmt, weights, data, scale)


def _quantized(
    kind: str, ds: jax.Array, fmt: Format | None, axis: int
) -> tuple[jax.Array, jax.Array]:
    data, scale = quantize_made(ds, fmt, axis)
    return shown_block("scores", "grad", kind, fmt, ds, data, scale), scale


def _finite(m: jax.Array) -> jax.Array:
    """Return ``m``, and 0 for the -inf of a query that has seen no key: ``exp(-inf - 0) = 0``."""
    return jnp.where(m == -jnp.inf, 0, m)


def _by_key(scale: jax.Array) -> jax.Array:
    """Align scales of keys with scores."""
    return scale[:, :, None, None, :]


def _block(x: Quantized, i: jax.Array, size: int, axis: int) -> Quantized:
    data, scale = (
        lax.dynamic_slice_in_dim(part, i * size, size, axis) for part in (x.data, x.scale)
    )
    return Quantized(data, scale, x.amax)


def _whole(x: Quantized, axis: int, block: int) -> Quantized:
    """Return `x` with tokens of zeros behind it, up to a whole block."""
    size = -(-x.scale.shape[axis] // block) * block
    data, scale = padded(x.data, axis, size), padded(x.scale, axis, size, SMALLEST_SCALE)
    return Quantized(data, scale, x.amax)


def _joined(blocks: jax.Array, rows: int) -> jax.Array:
    """``[blocks, batch, heads, groups, queries, ...]`` with the first `rows` queries in a row."""
    x = jnp.moveaxis(blocks, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :rows]


def _added(x: jax.Array, part: jax.Array, at: jax.Array, axis: int) -> jax.Array:
    """Return `x` with `part` added to it, from `at` on along `axis`."""
    before = lax.dynamic_slice_in_dim(x, at, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, before + part, at, axis)


def _with_block(
    dbias: jax.Array | None, ds: jax.Array, at: tuple[jax.Array, jax.Array]
) -> jax.Array | None:
    """Add the gradient of a block of scores to the bias's, if any, summed where that is 1 wide."""
    if dbias is None:
        return None
    ds = jnp.sum(ds, axis=[d for d in range(5) if dbias.shape[d] == 1], keepdims=True)
    start = [0, 0, 0, *(x if n > 1 else 0 for x, n in zip(at, dbias.shape[3:], strict=True))]
    before = lax.dynamic_slice(dbias, start, ds.shape)
    return lax.dynamic_update_slice(dbias, before + ds, start)
