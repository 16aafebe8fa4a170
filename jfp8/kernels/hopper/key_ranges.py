"""Which keys each query sees in a kernel for attention, and which blocks of keys to visit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.mask_bits import shown


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Key `j` is visible to query `i` if ``i - left <= j <= i + right`` and ``j < length``.

    `left` and `right` are not negative; None: no such bound.
    """

    left: int | None
    right: int | None
    length: int | jax.Array

    def blocks(self, row: jax.Array, rows: int, block: int) -> tuple[jax.Array, ...]:
        """Which blocks of `block` keys the queries ``[row, row + rows)`` see.

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

    def masked(self, x: jax.Array, otherwise: float, row: jax.Array, first: jax.Array) -> jax.Array:
        """`x`, and `otherwise` where a query does not see a key.

        Args:
          x: ``f32[rows, keys]``, laid out for wgmma.
          otherwise: a number.
          row, first: the first query, and the first key.
        """
        shape, layout = x.shape, plgpu.Layout.WGMMA
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        query = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        query, along = query + (row - first), lambda x: lax.broadcast_in_dim(x, shape, (0,))
        right = 2**30 if self.right is None else self.right
        stop = jnp.minimum(query + (right + 1), self.length - first)
        # A thread has the columns c + own, for constants c and an `own` of the bits 1 and 2. On two
        # sides of a comparison they cost one instruction for each column. Else the compiler would
        # compute their sums before the loop, and keep them in registers.
        constant, own = key & ~6, key & 6
        x = jnp.where(constant < along(stop) - own, x, otherwise)
        if self.left is not None:
            x = jnp.where(constant < along(query - self.left) - own, otherwise, x)
        return x


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys of a block some queries see.

    Attributes:
      bounds: of the head.
      row, key: the first query and the first key.
      sees_all: bool[], whether all queries see all keys; None: it is known that they do.
      branch: whether a mask is made only where it is needed. Branches cost registers.
      words: of a mask's bits for these queries, in shared memory; None: there is none.
    """

    bounds: Bounds
    row: jax.Array
    key: jax.Array
    sees_all: jax.Array | None
    branch: bool
    words: Any = None

    def choose(
        self, all_seen: Callable[..., Any], some_seen: Callable[..., Any], *args: Any
    ) -> Any:
        """``all_seen(*args)`` if all queries see all keys, else ``some_seen(*args)``."""
        if self.words is None and self.sees_all is None:
            return all_seen(*args)
        if self.words is not None or not self.branch:
            return some_seen(*args)
        return lax.cond(self.sees_all, all_seen, some_seen, *args)

    def where(self, x: jax.Array, otherwise: float, start: int) -> jax.Array:
        """`x`, of keys of the block from `start` on, or `otherwise` where one is not seen."""
        if self.sees_all is not None:
            x = self.bounds.masked(x, otherwise, self.row, self.key + start)
        return x if self.words is None else shown(x, otherwise, self.words, start)
