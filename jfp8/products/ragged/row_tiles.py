"""Rows of groups laid out in tiles of equal height, each of which belongs to one group."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class RowTiles(NamedTuple):
    """Places of the rows of groups in tiles, for ``m`` rows and ``t`` tiles of height ``h``."""

    rows: jax.Array  # i32[t, h], the row at each place; ``m`` if there is none
    slots: jax.Array  # i32[m], the place of each row in all tiles; ``t * h`` for rows of no group
    group: jax.Array  # i32[t], the group of each tile
    padded_sizes: jax.Array  # i32[g], number of rows in the tiles of each group


def lay_out(sizes: jax.Array, m: int, height: int) -> RowTiles:
    """Return tiles for groups of `sizes`, i32[g], among `m` rows; enough for the worst case."""
    groups = sizes.shape[0]
    filled = min(groups, m)
    # At worst, each group but one has a single row, or one more than fills its tiles.
    count = max((m - filled) // height + filled, 1)
    tiles = -(-sizes // height)
    tile_end, row_end = jnp.cumsum(tiles), jnp.cumsum(sizes)
    tile_start, row_start = tile_end - tiles, row_end - sizes

    def group_of(position: jax.Array, end: jax.Array) -> jax.Array:
        # Tiles beyond the last get its group, whose matrix is needed anyway.
        position = jnp.clip(position, 0, jnp.maximum(end[-1] - 1, 0))
        found = jnp.sum(end[None] <= position[:, None], 1)  # without a loop of small kernels
        return jnp.minimum(found, groups - 1).astype(jnp.int32)

    tile = jnp.arange(count, dtype=jnp.int32)
    group = group_of(tile, tile_end)
    begin = (tile - tile_start[group]) * height
    within = begin[:, None] + jnp.arange(height, dtype=jnp.int32)[None, :]
    rows = jnp.where(within < sizes[group][:, None], row_start[group][:, None] + within, m)

    row = jnp.arange(m, dtype=jnp.int32)
    group_of_row = group_of(row, row_end)
    slots = tile_start[group_of_row] * height + row - row_start[group_of_row]
    slots = jnp.where(row < row_end[-1], slots, count * height)
    return RowTiles(rows, slots, group, tiles * height)


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return `rows_at`, whose gradient is a gather, too.

    Args:
      index: in which each row occurs at most once.
      inverse: i32[rows], the position of each row in the flat `index`, else past its end.
    """
    return rows_at(x, index)


def rows_at(x: jax.Array, index: jax.Array, fill: Any = 0) -> jax.Array:
    """Return ``x[index]``, and `fill` where `index` is beyond the last row."""
    if not x.shape[0]:
        return jnp.full((*index.shape, *x.shape[1:]), fill, x.dtype)
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=fill)


def _take_rows_fwd(x, index, inverse):
    return rows_at(x, index), (index, inverse)


def _take_rows_bwd(residuals, ct):
    index, inverse = residuals
    ct = ct.reshape(index.size, *ct.shape[index.ndim :])
    return rows_at(ct, inverse), None, None


take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)
