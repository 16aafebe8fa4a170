"""Name the operands of the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Stored(NamedTuple):
    """Hold the f8 matrices, each in the layout of its matmuls: contraction last."""

    q: jax.Array  # [..., G, T, H], for S
    k: jax.Array  # [..., G / groups, S, H], for S
    v: jax.Array  # likewise, for dP
    grad: jax.Array  # as q, for dP
    q_t: jax.Array  # [..., G, H, T], for dK
    k_t: jax.Array  # [..., G / groups, H, S], for dQ
    grad_t: jax.Array  # as q_t, for dV


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
