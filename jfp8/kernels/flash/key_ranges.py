"""Tell which keys each query sees in a kernel, and which blocks of keys to visit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bound the keys `j` that query `i` sees: ``i - left <= j <= i + right`` and ``j < length``.

    `left` and `right` are not negative; None: no such bound.
    """

    left: int | None
    right: int | None
    length: int | jax.Array

    def blocks(self, row: jax.Array, rows: int, block: int) -> tuple[jax.Array, ...]:
        """Return which blocks of `block` keys the queries ``[row, row + rows)`` see.

        Returns:
          ``first, first_full, end_full, end``: the first of which a query sees a key, the first of
          which all queries see all keys, and the ends of both.
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
        """Return `x`, and `otherwise` where a query does not see a key.

        Args:
          x: ``f32[rows, keys]``.
          otherwise: a number.
          query: ``i32[rows]``, less `first`.
          first: the first key.
          below: which columns are smaller than ``i32[rows]``: ``bool[rows, keys]``.
        """
        right = 2**30 if self.right is None else self.right
        x = jnp.where(below(jnp.minimum(query + (right + 1), self.length - first)), x, otherwise)
        if self.left is not None:
            x = jnp.where(below(query - self.left), otherwise, x)
        return x
