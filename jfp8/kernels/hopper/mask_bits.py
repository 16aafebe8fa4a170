"""Masks of attention in its kernels: bits, packed outside of them, which a block copies and tests.

Scores have rows and columns: queries and keys, or, transposed, keys and queries. A word has the
bits of 32 columns of a row, and words of 32 columns lie side by side for all rows, as a block
copies them: an eighth of a byte for a score. A dimension along which a mask is the same is no
longer than a block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.attention_parts import BY_ROW, COMPUTE, ROWS, along, load
from jfp8.kernels.hopper.tiles import padded

WORD = 32
TILE = COMPUTE * ROWS  # rows of a block


def packed(
    mask: jax.Array, sizes: tuple[int, int], columns: int, width: int, groups: int = 1
) -> dict[str, jax.Array]:
    """What a kernel takes of a mask: bits, and which blocks of `width` columns a tile visits. ::

        bits[b, n, c // 32, r] >> (c % 32) & 1    whether row r sees column c
        spans[b, n, :, t]    the first block of which tile t of rows sees some, and the end of them

    Args:
      mask: ``bool[B | 1, N | 1, T | 1, S | 1]``.
      sizes: T and S.
      columns: which dimension of `mask` has the columns of the kernel: 3, keys, or 2, queries.
      width: a multiple of 32.
      groups: how many heads the kernel visits for a tile: those have one span.

    Returns:
      ``bits``: ``i32[B | 1, N | 1, columns' / 32, rows']``, of whole blocks and tiles, or of one
      where the mask is the same for all columns or rows. ``spans``: ``i32[B | 1, N / groups | 1, 2,
      tiles]``.
    """
    parts = (TILE, width) if columns == 3 else (width, TILE)
    one = [n if n > 1 else part for n, part in zip(mask.shape[2:], parts, strict=True)]
    mask = padded(jnp.broadcast_to(mask, (*mask.shape[:2], *one)), 1, 1, *parts)
    words = mask.reshape(*mask.shape[:columns], -1, WORD, *mask.shape[columns + 1 :])
    # XLA packs in one pass what is selected; it writes all integers of what is converted.
    bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, words.shape, columns + 1)
    bits = jnp.sum(jnp.where(words, bit, 0), axis=columns + 1, dtype=jnp.int32)
    bits = bits if columns == 2 else bits.swapaxes(2, 3)

    batch, heads, *_, rows = bits.shape
    by_block = bits.reshape(batch, heads, -1, width // WORD, rows // TILE, TILE)
    seen = jnp.any(by_block != 0, axis=(3, 5))
    if heads > 1:
        seen = jnp.any(seen.reshape(batch, -1, groups, *seen.shape[2:]), axis=2)
    blocks, tiles = (-(-sizes[d - 2] // parts[d - 2]) for d in (columns, 5 - columns))
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], blocks, tiles))
    block = lax.broadcasted_iota(jnp.int32, seen.shape, 2)
    first = jnp.min(jnp.where(seen, block, blocks), axis=2)
    end = jnp.max(jnp.where(seen, block + 1, 0), axis=2)
    return {"bits": bits, "spans": jnp.stack([first, end], axis=2)}


def ring(stages: int, width: int, operands: dict[str, jax.Array]) -> dict[str, Any]:
    """The shared memory for the bits of `stages` blocks, if there are any."""
    if "bits" not in operands:
        return {}
    return {"bits_ring": plgpu.SMEM((stages, width // WORD, TILE), jnp.int32)}


def stage_bytes(width: int, *, with_mask: bool) -> int:
    """What a stage of `ring` takes."""
    return width // WORD * TILE * 4 if with_mask else 0


# In a kernel


def span(
    given: dict[str, Any], head: tuple[Any, Any], tile: Any, first: Any, end: Any
) -> tuple[Any, Any]:
    """Blocks ``[first, end)`` without those before and after all that the mask shows to a tile.

    Args:
      given: the operands of a kernel; without a mask, nothing changes.
      head: the batch, and which of its heads.
      tile: of rows.
    """
    if "spans" not in given:
        return first, end
    spans = given["spans"]
    at = [_in(i, n) for i, n in zip(head, spans.shape, strict=False)]
    first = jnp.maximum(first, spans[*at, 0, tile])
    return first, jnp.maximum(first, jnp.minimum(end, spans[*at, 1, tile]))


def of_block(bits: Any, head: tuple[Any, Any], tile: Any, block: Any, width: int) -> Any:
    """The words of a tile of rows and a block of `width` columns, in device memory."""
    words = width // WORD
    sizes = *bits.shape[:2], bits.shape[2] // words, bits.shape[3] // TILE
    batch, head, block, tile = (_in(i, n) for i, n in zip((*head, block, tile), sizes, strict=True))
    return bits.at[batch, head, pl.ds(block * words, words), pl.ds(tile * TILE, TILE)]


def of_rows(ring: Any, slot: Any, warpgroup: Any) -> Any:
    """The words of a stage for the rows of a warpgroup; None without a mask."""
    return None if ring is None else ring.at[slot, :, pl.ds(warpgroup * ROWS, ROWS)]


def _in(i: Any, n: int) -> Any:
    """Where the `i`-th is in a dimension that may be 1 for all."""
    return i if n > 1 else 0


def shown(x: jax.Array, otherwise: float, words: Any, start: int) -> jax.Array:
    """`x`, and `otherwise` where a bit is 0.

    Args:
      x: ``f32[rows, n]``, laid out for wgmma: columns from `start` on, within a word or whole ones.
      otherwise: a number.
      words: i32[width / 32, rows], in shared memory.
      start: a column of the block.
    """
    columns = min(WORD, x.shape[1])
    shape, layout = (x.shape[0], columns), plgpu.Layout.WGMMA
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    # As in `Bounds.masked`, a thread shifts a word once by what is its own, and then by constants.
    # Bits become signs, since for heads of 256 the compiler spills where bits are compared to 0.
    constant, own = (column & ~6) + start % WORD, column & 6
    parts = []
    for c in range(0, x.shape[1], columns):
        word = along(load(words.at[(start + c) // WORD], BY_ROW), shape, 0)
        bit = (word << (6 - own)) << (25 - constant)
        parts.append(jnp.where(bit < 0, x[:, c : c + columns], otherwise))
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
