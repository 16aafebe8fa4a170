"""Pack masks of attention into bits, outside the kernels.

Scores have rows and columns: queries and keys, or, transposed, keys and queries. A word has the
bits of 32 columns of a row, and words of 32 columns are contiguous for all rows, as a block
copies them: an eighth of a byte for a score. A dimension along which a mask is constant is no
longer than a tile, or than the columns of a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.kernels.shared_memory import padded

WORD = 32


def packed(
    mask: jax.Array, shape: tuple[int, int], columns: int, sizes: tuple[int, int], groups: int = 1
) -> dict[str, jax.Array]:
    """Return the bits of a mask, and which blocks of columns a tile visits. ::

        bits[b, n, c // 32, r] >> (c % 32) & 1    1 if row r sees column c
        spans[b, n, :, t]    first block of which tile t of rows sees a column, and the end

    Args:
      mask: ``bool[... | 1, N | 1, T | 1, S | 1]``.
      shape: T and S.
      columns: the dimension of `mask` with the columns of the kernel: 3, keys, or 2, queries.
      sizes: rows of a tile, and columns of a step, a multiple of 32.
      groups: number of heads that the kernel visits for a tile, which share a span.

    Returns:
      ``bits``: ``i32[B | 1, N | 1, columns' / 32, rows']``, of whole blocks and tiles, or of one
      if the mask is the same for all columns or rows. ``spans``: ``i32[B | 1, N / groups | 1, 2,
      tiles]``.
    """
    mask, (tile, width) = mask.reshape(-1, *mask.shape[-3:]), sizes
    parts = sizes if columns == 3 else (width, tile)
    one = [n if n > 1 else part for n, part in zip(mask.shape[2:], parts, strict=True)]
    mask = padded(jnp.broadcast_to(mask, (*mask.shape[:2], *one)), 1, 1, *parts)
    words = mask.reshape(*mask.shape[:columns], -1, WORD, *mask.shape[columns + 1 :])
    # XLA packs the result of a select in one pass, but writes integers of a conversion to memory.
    bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, words.shape, columns + 1)
    bits = jnp.sum(jnp.where(words, bit, 0), axis=columns + 1, dtype=jnp.int32)
    bits = bits if columns == 2 else bits.swapaxes(2, 3)

    batch, heads, *_, rows = bits.shape
    by_block = bits.reshape(batch, heads, -1, width // WORD, rows // tile, tile)
    seen = jnp.any(by_block != 0, axis=(3, 5))
    if heads > 1:
        seen = jnp.any(seen.reshape(batch, -1, groups, *seen.shape[2:]), axis=2)
    blocks, tiles = (-(-shape[d - 2] // parts[d - 2]) for d in (columns, 5 - columns))
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], blocks, tiles))
    block = lax.broadcasted_iota(jnp.int32, seen.shape, 2)
    first = jnp.min(jnp.where(seen, block, blocks), axis=2)
    end = jnp.max(jnp.where(seen, block + 1, 0), axis=2)
    return {"bits": bits, "spans": jnp.stack([first, end], axis=2)}
