"""Name the operands of the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax


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
    """Hold the numbers of each query, ``f32[..., G, T]``, or key, ``f32[..., G / groups, S]``.

    The scales of the matrices of `Stored`; `lse` of the forward pass; and `dot`, ``sum_h dO O``.
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
