"""Describe the attention that a kernel is compiled for, its operands, tiles and steps.

A block of a kernel takes one tile of a head: queries, or keys. It has three warpgroups. One only
copies, into a ring of shared memory; the other two compute, and loop over the slots of the ring: a
block of keys in each step, or a block of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.scaling.formats import Format

BLOCK = 128  # keys of a step, and of a tile of keys
QUERIES = 64  # queries of a step
WORD = 32  # bits of a mask


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describe the heads, and the keys that their queries see."""

    rows: int  # queries of a head, padded
    keys: int  # of a head, not padded
    size: int  # of a head
    groups: int  # number of heads of queries that share a head of keys and values
    scale: float
    left: int | None  # bounds of the window; None for none
    right: int | None
    formats: tuple[Format, ...] = ()  # of dS in dQ and in dK; of a forward pass: none

    @property
    def windowed(self) -> bool:
        """Return True if a query sees only the keys of a window."""
        return self.left is not None or self.right is not None


class Stored(NamedTuple):
    """Hold the f8 matrices of the backward pass, with the contraction of their matmuls last."""

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


def window_of(is_causal: bool, window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return the number of keys that a query sees to the left and right; None for all."""
    left, right = window or (None, None)
    return left, 0 if is_causal else right


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bound the keys `j` that query `i` sees: ``i - left <= j <= i + right`` and ``j < length``.

    `left` and `right` are not negative; None for no such bound.
    """

    left: int | None
    right: int | None
    length: int | jax.Array

    def blocks(self, row: jax.Array, rows: int, block: int) -> tuple[jax.Array, ...]:
        """Return the range of blocks of `block` keys that the queries ``[row, row + rows)`` see.

        Returns:
          ``first, first_full, end_full, end``: the first block of which a query sees a key, the
          first of which all queries see all keys, and the ends of both ranges.
        """
        length, last = jnp.int32(self.length), row + rows - 1
        stop, stop_full = length, length
        if self.right is not None:
            stop = jnp.minimum(length, last + self.right + 1)
            stop_full = jnp.minimum(length, row + self.right + 1)
        end = lax.div(stop + block - 1, block)
        first = first_full = jnp.int32(0)
        if self.left is not None:
            first = jnp.minimum(lax.div(jnp.maximum(row - self.left, 0), block), end)
            first_full = lax.div(jnp.maximum(last - self.left, 0) + block - 1, block)
            first_full = jnp.clip(first_full, first, end)
        end_full = jnp.clip(lax.div(stop_full, block), first_full, end)
        return first, first_full, end_full, end

    def where_seen(
        self,
        x: jax.Array,
        otherwise: float,
        query: jax.Array,
        first: jax.Array,
        below: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Return `x`, or `otherwise` where a query does not see a key.

        Args:
          x: ``f32[rows, keys]``.
          query: ``i32[rows]``, less `first`.
          first: the first key.
          below: which columns are smaller than ``i32[rows]``: ``bool[rows, keys]``.
        """
        right = 2**30 if self.right is None else self.right
        x = jnp.where(below(jnp.minimum(query + (right + 1), self.length - first)), x, otherwise)
        if self.left is not None:
            x = jnp.where(below(query - self.left), otherwise, x)
        return x
