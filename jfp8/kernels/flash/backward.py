"""Call the two kernels of the backward pass of attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.flash.key_tile import KeyTile
from jfp8.kernels.flash.launch import launch, padded_operand
from jfp8.kernels.flash.mask_bits import packed
from jfp8.kernels.flash.operands import Stored, Vectors
from jfp8.kernels.flash.problem import BLOCK, QUERIES, Problem, window_of
from jfp8.kernels.flash.query_tile import QueryTile
from jfp8.kernels.flash.ring import heads_first
from jfp8.kernels.shared_memory import padded
from jfp8.scaling.formats import Format


def attention_backward(
    of_queries: type[QueryTile],
    of_keys: type[KeyTile],
    stored: Stored,
    vectors: Vectors,
    key_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    groups: int,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    formats: tuple[Format, Format],
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute dQ, dK and dV, and the largest ``|dS|`` of each query.

    See `BackwardTile` and `KeyTile` for the equations, `attention_forward` for other arguments.

    Args:
      of_queries, of_keys: the task of a block of the kernels for dQ, and for dK and dV.
      formats: of dS in dQ and in dK: E4M3FN or E5M2.

    Returns:
      ``out_dtype[..., G, T, H]``, ``out_dtype[..., G / groups, S, H]`` twice, ``f32[..., G, T]``.
    """
    (*_, rows, size), keys = stored.q.shape, stored.k.shape[-2]
    operands = _prepared(stored, vectors, key_lengths, scale, of_queries.tokens)
    bounds = window_of(is_causal, window)
    problem = Problem(operands["q"].shape[1], keys, size, groups, scale, *bounds, formats)

    def run(work: Any, bits: dict[str, jax.Array], *but: str) -> Any:
        given = {name: x for name, x in operands.items() if name not in but} | bits
        heads = getattr(stored, work.like).shape[-3]
        return launch(work, problem, given, heads, out_dtype)

    by_query, by_key = {}, {}
    if mask is not None:
        by_query = packed(mask, (rows, keys), 3, (of_queries.tokens, of_queries.width))
        by_key = packed(mask, (rows, keys), 2, (of_keys.tokens, of_keys.width), groups)
    dq, largest = run(of_queries, by_query, "q_t", "grad_t", "unit")
    found = run(of_keys, by_key, "k_t", "key_lengths")
    dk, dv = (heads_first(x, stored.k.shape) for x in found)
    if key_lengths is not None:  # padded keys have values, too
        real = lax.broadcasted_iota(jnp.int32, dk.shape, dk.ndim - 2) < key_lengths[..., None, None]
        dk, dv = jnp.where(real, dk, 0), jnp.where(real, dv, 0)
    largest = largest[:, :rows].reshape(stored.q.shape[:-1])
    return heads_first(dq, stored.q.shape), dk, dv, largest


def _prepared(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float, tile: int
) -> dict[str, jax.Array]:
    """Return the kernels' operands by name; `tile` is one of queries."""
    found = {name: padded_operand(name, x, tile) for name, x in stored._asdict().items()}
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, as has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % tile)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, by which they are divided to become weights.
    grad_t = padded(v.grad_t, 1, tile)
    in_blocks = grad_t.reshape(len(grad_t), -1, QUERIES)
    largest = jnp.max(in_blocks, axis=2, keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    found["unit"] = largest[:, :, 0] * 2.0**-8
    weights = (in_blocks / largest * 2.0**8).reshape(grad_t.shape)
    by_query = v.q * (scale * math.log2(math.e)), v.grad, v.dot, v.q_t
    factor, grad, dot, q_t = (padded(x, 1, tile) for x in by_query)
    found["by_query"] = jnp.stack([factor, of_sum, grad, dot, weights, q_t], 1)
    found["by_key"] = jnp.stack([padded(x, 1, BLOCK) for x in (v.k, v.v, v.k_t)], 1)
    if key_lengths is not None:
        found["key_lengths"] = key_lengths.reshape(-1)
    return found
