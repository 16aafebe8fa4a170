"""Mask keys that queries do not see, in registers in the layout of wgmma."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.mask_bits import WORD
from jfp8.kernels.flash.problem import Bounds
from jfp8.kernels.flash.tile_work import TileWork
from jfp8.kernels.hopper.wgmma import BY_ELEMENT, BY_ROW, ROWS
from jfp8.kernels.shared_memory import along, load


@dataclasses.dataclass(frozen=True)
class Mask:
    """Compute which keys of a block each query sees."""

    bounds: Bounds  # of the head
    row: jax.Array  # the first query
    key: jax.Array
    sees_all: jax.Array | None  # True if all queries see all keys; None if that is statically known
    branch: bool  # True to compute a mask only if needed; branches cost registers
    words: Any = None  # of a mask's bits for these queries, in shared memory; None without a mask

    def choose(
        self, all_seen: Callable[..., Any], some_seen: Callable[..., Any], *args: Any
    ) -> Any:
        """Return ``all_seen(*args)`` if all queries see all keys, else ``some_seen(*args)``."""
        if self.words is None and self.sees_all is None:
            return all_seen(*args)
        if self.words is not None or not self.branch:
            return some_seen(*args)
        return lax.cond(self.sees_all, all_seen, some_seen, *args)

    def where(self, x: jax.Array, otherwise: float, start: int) -> jax.Array:
        """Return `x`, for keys of the block from `start` on, or `otherwise` if one is not seen."""
        if self.sees_all is not None:
            x = _where_seen(self.bounds, x, otherwise, self.row, self.key + start)
        return x if self.words is None else _where_shown(x, otherwise, self.words, start)

    def hide(self, xs: list[jax.Array], otherwise: float, parts: list[Any]) -> list[jax.Array]:
        """Return slices of the block with `otherwise` where a key is not seen."""
        hidden = lambda xs: [
            self.where(x, otherwise, part.start) for x, part in zip(xs, parts, strict=True)
        ]
        return self.choose(lambda xs: xs, hidden, xs)


def masks_of(
    work: TileWork, bounds: Bounds, row: jax.Array, *, bounded: bool, branch: bool
) -> Callable[[jax.Array, jax.Array], Mask]:
    """Return a function that computes the mask of block `t`, in a slot, for rows from `row` on.

    `bounded` is True if `bounds` may hide anything; see `Mask` for `branch`.
    """
    _, first_full, end_full, _ = bounds.blocks(row, ROWS, work.width)

    def mask(t: jax.Array, slot: jax.Array) -> Mask:
        sees_all = (t >= first_full) & (t < end_full) if bounded else None
        words = None
        if "bits" in work.given:
            words = work.memory.bits_ring.at[slot, :, pl.ds(row - work.row, ROWS)]
        return Mask(bounds, row, t * work.width, sees_all, branch, words)

    return mask


def _where_seen(
    bounds: Bounds, x: jax.Array, otherwise: float, row: jax.Array, first: jax.Array
) -> jax.Array:
    """Return `x`, or `otherwise` where a query from `row` on does not see a key from `first` on.

    A thread has the columns c + own, for constants c and an `own` of the bits 1 and 2. On opposite
    sides of a comparison they cost one instruction per column. Otherwise the compiler would compute
    their sums before the loop, and keep them in registers.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BY_ELEMENT)
    query = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=BY_ROW) + (row - first)

    def below(n: jax.Array) -> jax.Array:
        constant, own = column & ~6, column & 6
        return constant < along(n, x.shape, 0) - own

    return bounds.where_seen(x, otherwise, query, first, below)


def _where_shown(x: jax.Array, otherwise: float, words: Any, start: int) -> jax.Array:
    """Return `x`, or `otherwise` where a bit of ``words[width / 32, rows]`` is 0.

    `x` has the columns of the block from `start` on, within one word or in whole words.
    """
    columns = min(WORD, x.shape[1])
    shape = x.shape[0], columns
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_ELEMENT)
    # As in `_where_seen`, a thread shifts a word once by its own offset, and then by constants.
    # Bits become signs, because the compiler spills with heads of 256 if bits are compared to 0.
    constant, own = (column & ~6) + start % WORD, column & 6
    parts = []
    for c in range(0, x.shape[1], columns):
        word = along(load(words.at[(start + c) // WORD], BY_ROW), shape, 0)
        bit = (word << (6 - own)) << (25 - constant)
        parts.append(jnp.where(bit < 0, x[:, c : c + columns], otherwise))
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
