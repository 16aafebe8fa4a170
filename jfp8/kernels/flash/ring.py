"""Bring blocks of tokens through a ring of shared memory."""

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

STAGES = 4  # at most
BARRIERS = 1024  # bytes that are left for them
MEMORY_REGISTERS = 24  # of a thread of the warpgroup that copies

# Operands ``[tokens, size]`` of a head; all others have tokens along their last dimension.
BY_TOKEN = ("q", "k", "v", "grad")


def of_tokens(name: str, head: Any, tokens: Any) -> Any:
    """Return these tokens of a head of the operand of this name."""
    return head.at[tokens] if name in BY_TOKEN else head.at[*_all_but_last(head), tokens]


def blocks_of(
    operands: dict[str, jax.Array], rings: dict[str, str], tokens: int
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of a block of `tokens` of operands, by the names of their rings."""
    found = {}
    for name, ring in rings.items():
        (_, *shape), dtype = operands[name].shape, operands[name].dtype
        shape[0 if name in BY_TOKEN else -1] = tokens
        found[ring] = tuple(shape), dtype
    return found


def with_ring(
    kept: dict[str, Any], blocks: dict[str, tuple[tuple[int, ...], Any]]
) -> dict[str, Any]:
    """Return what a kernel keeps, and beside it rings of these blocks with their barriers.

    Rings have as many slots as fit.
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
    """Call ``copy(i, slot)`` for each step, when its slot is free; all by one warpgroup."""
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        copy(i, slot)

    # A block must not end before all have arrived at its barriers.
    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(i):
        plgpu.barrier_wait(empty.at[lax.rem(i, stages)])


def _all_but_last(x: Any) -> list[slice]:
    return [slice(None)] * (len(x.shape) - 1)


def _bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize
