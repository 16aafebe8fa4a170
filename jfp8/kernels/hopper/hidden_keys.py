"""Hide what queries do not see, in registers as wgmma lays them out."""

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
    """Tell which keys of a block some queries see."""

    bounds: Bounds  # of the head
    row: jax.Array  # the first query
    key: jax.Array
    sees_all: jax.Array | None  # do all queries see all keys? None: it is known that they do
    branch: bool  # make a mask only where it is needed? Branches cost registers
    words: Any = None  # of a mask's bits for these queries, in shared memory; None: no mask

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
        """Return `x`, of keys of the block from `start` on, or `otherwise` if one is not seen."""
        if self.sees_all is not None:
            x = _where_seen(self.bounds, x, otherwise, self.row, self.key + start)
        return x if self.words is None else _where_shown(x, otherwise, self.words, start)

    def hide(self, xs: list[jax.Array], otherwise: float, parts: list[Any]) -> list[jax.Array]:
        """Return parts of the block with `otherwise` where a key is not seen."""
        hidden = lambda xs: [
            self.where(x, otherwise, part.start) for x, part in zip(xs, parts, strict=True)
        ]
        return self.choose(lambda xs: xs, hidden, xs)


def masks_of(
    work: TileWork, bounds: Bounds, row: jax.Array, *, bounded: bool, branch: bool
) -> Callable[[jax.Array, jax.Array], Mask]:
    """Return a function that makes the mask of block `t`, in a slot, for rows from `row` on.

    `bounded` says whether `bounds` may hide anything; for `branch` see `Mask`.
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
    """Return `x`, and `otherwise` where a query from `row` on does not see a key from `first` on.

    A thread has the columns c + own, for constants c and an `own` of the bits 1 and 2. On two sides
    of a comparison they cost one instruction for each column. Else the compiler would compute their
    sums before the loop, and keep them in registers.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BY_ELEMENT)
    query = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=BY_ROW) + (row - first)

    def below(n: jax.Array) -> jax.Array:
        constant, own = column & ~6, column & 6
        return constant < along(n, x.shape, 0) - own

    return bounds.where_seen(x, otherwise, query, first, below)


def _where_shown(x: jax.Array, otherwise: float, words: Any, start: int) -> jax.Array:
    """Return `x`, and `otherwise` where a bit of ``words[width / 32, rows]`` is 0.

    `x` has the columns of the block from `start` on, within a word or whole ones.
    """
    columns = min(WORD, x.shape[1])
    shape = x.shape[0], columns
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_ELEMENT)
    # As in `_where_seen`, a thread shifts a word once by what is its own, and then by constants.
    # Bits become signs, since for heads of 256 the compiler spills where bits are compared to 0.
    constant, own = (column & ~6) + start % WORD, column & 6
    parts = []
    for c in range(0, x.shape[1], columns):
        word = along(load(words.at[(start + c) // WORD], BY_ROW), shape, 0)
        bit = (word << (6 - own)) << (25 - constant)
        parts.append(jnp.where(bit < 0, x[:, c : c + columns], otherwise))
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
