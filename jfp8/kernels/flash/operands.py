"""Name the operands of attention's kernels, and pad them to whole tiles and blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.flash.problem import BLOCK, QUERIES
from jfp8.kernels.shared_memory import padded


class Stored(NamedTuple):
    """Hold the f8 matrices, each as its products take it: the contraction last.

    Attributes:
      q, grad: ``f8[..., G, T, H]``, for S and for dP.
      k, v: ``f8[..., G / groups, S, H]``, for S and for dP.
      q_t, grad_t: ``f8[..., G, H, T]``, for dK and for dV.
      k_t: ``f8[..., G / groups, H, S]``, for dQ.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    q_t: jax.Array
    k_t: jax.Array
    grad_t: jax.Array


class Vectors(NamedTuple):
    """Hold the numbers of each query and key, f32.

    Attributes:
      q, grad: scales of these matrices of `Stored`, ``[..., G, T]``.
      k, v: likewise, ``[..., G / groups, S]``.
      q_t, grad_t: likewise, ``[..., G, T]``.
      k_t: likewise, ``[..., G / groups, S]``.
      log_sum: `lse` of the forward pass, ``[..., G, T]``.
      dot: ``sum_h dO O``, ``[..., G, T]``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    q_t: jax.Array
    k_t: jax.Array
    grad_t: jax.Array
    log_sum: jax.Array
    dot: jax.Array


def padded_matrix(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return the operand of this name, ``[heads, tokens, size]``, or transposed if it is ``_t``."""
    tokens = _multiple(name, tile)
    x = x.reshape(-1, *x.shape[-2:])
    return padded(x, 1, 1, tokens) if name.endswith("_t") else padded(x, 1, tokens, 1)


def padded_vector(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return the operand of this name, ``[heads, tokens]``."""
    return padded(x.reshape(-1, x.shape[-1]), 1, _multiple(name, tile))


def _multiple(name: str, tile: int) -> int:
    return BLOCK if name[0] in "kv" else tile


def backward_operands(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float, tile: int
) -> dict[str, jax.Array]:
    """Return what the kernels take, by the names that it has there; `tile` is one of queries."""
    found = {name: padded_matrix(name, x, tile) for name, x in stored._asdict().items()}
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, and so has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % tile)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, without which they become weights.
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
