"""Pass blocks of tokens through a ring of shared memory, and write results to memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.shared_memory import COMPUTE, SHARED_MEMORY, tile

STAGES = 4  # maximum number of slots
BARRIERS = 1024  # bytes reserved for barriers
MEMORY_REGISTERS = 24  # of a thread of the warpgroup that copies

# Operands ``[tokens, size]`` of a head; all others have tokens along their last dimension.
BY_TOKEN = ("q", "k", "v", "grad")


def with_ring(
    kept: dict[str, Any], blocks: dict[str, tuple[tuple[int, ...], Any]]
) -> dict[str, Any]:
    """Return the memory of a kernel, and rings of these blocks with their barriers.

    Rings have as many slots as fit into memory.
    """
    used = (x for x in kept.values() if getattr(x, "memory_space", None) == plgpu.SMEM)
    free = SHARED_MEMORY - sum(_bytes(x.shape, x.dtype) for x in used) - BARRIERS
    stages = min(STAGES, free // sum(_bytes(*block) for block in blocks.values()))
    memory = lambda dtype: tile if jnp.dtype(dtype).itemsize == 1 else plgpu.SMEM
    slots = {n: memory(dtype)((stages, *s), dtype) for n, (s, dtype) in blocks.items()}
    full = plgpu.Barrier(num_arrivals=len(blocks), num_barriers=stages)
    # One thread of a warpgroup arrives at a barrier of a cluster, all 128 at a plain one.
    empty = plgpu.ClusterBarrier(
        collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=stages
    )
    return kept | slots | {"full": full, "empty": empty}


def fill(steps: jax.Array, stages: int, empty: Any, copy: Callable[[Any, Any], None]) -> None:
    """Call ``copy(i, slot)`` for each step, when its slot is free; all in one warpgroup."""
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    copy_each(steps, stages, empty, copy)
    drain(steps, stages, empty)


def copy_each(
    steps: Any, stages: int, empty: Any, copy: Callable[[Any, Any], None], before: Any = None
) -> None:
    """Call ``copy(i, slot)`` for each step, after `before` others, when its slot is free."""

    @pl.loop(0, steps)
    def _(i):
        step = i if before is None else before + i
        slot = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        copy(i, slot)


def drain(steps: jax.Array, stages: int, empty: Any) -> None:
    """Wait for the last slots: a block must not end before all threads arrive at its barriers."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])


def _bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


# Results


def place(result: Any, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return the index of this block's head among all ``B N`` heads, and of its tile.

    `result` is ``[B, T, N, H]``, and `tile` the tokens of a tile.
    """
    at, tiles = lax.axis_index("tile"), result.shape[1] // tile
    head = lax.axis_index("batch") * result.shape[2] + lax.div(at, tiles)
    return head, lax.rem(at, tiles)


def in_batch(result: Any, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the batch of this block, and the index of `head` in it."""
    batch = lax.axis_index("batch")
    return batch, head - batch * result.shape[2]


def head_of(result: Any, head: jax.Array) -> Any:
    """Return the ``[T, H]`` of this block's head in a result ``[B, T, N, H]``."""
    batch, n = in_batch(result, head)
    return result.at[batch, :, n]


def heads_first(result: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a padded result ``[B, T', N, H]`` as ``[..., N, T, H]``.

    XLA fuses this into the operation after it.
    """
    return result[:, : shape[-2]].swapaxes(1, 2).reshape(shape)


def store(parts: list[jax.Array], staged: Any, target: Any) -> None:
    """Write columns of a result, rounded, to memory through the slots of `staged`."""
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
