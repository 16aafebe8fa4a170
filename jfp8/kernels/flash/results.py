"""Find the place of a block's results, and bring them there."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def place(result: Any, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return which of all ``B N`` heads is this block's, and which of its tiles.

    `result` is ``[B, T, N, H]``, and `tile` the tokens of a tile.
    """
    at, tiles = lax.axis_index("tile"), result.shape[1] // tile
    head = lax.axis_index("batch") * result.shape[2] + lax.div(at, tiles)
    return head, lax.rem(at, tiles)


def in_batch(result: Any, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the batch of this block, and which of its heads `head` is."""
    batch = lax.axis_index("batch")
    return batch, head - batch * result.shape[2]


def head_of(result: Any, head: jax.Array) -> Any:
    """Return the ``[T, H]`` of this block's head in a result ``[B, T, N, H]``."""
    batch, n = in_batch(result, head)
    return result.at[batch, :, n]


def heads_first(result: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a padded result ``[B, T', N, H]`` as ``[..., N, T, H]``.

    XLA does it with the operation that follows.
    """
    return result[:, : shape[-2]].swapaxes(1, 2).reshape(shape)


def store(parts: list[jax.Array], staged: Any, target: Any) -> None:
    """Write columns of a result, rounded, to memory by way of the slots of `staged`."""
    slots, _, width = staged.shape
    pieces = [x[:, c : c + width] for x in parts for c in range(0, x.shape[1], width)]
    for n, x in enumerate(pieces):
        slot = staged.at[n % slots]
        if n >= slots:
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        slot[...] = x.astype(slot.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, target.at[:, pl.ds(n * width, width)])
    plgpu.wait_smem_to_gmem(0)
