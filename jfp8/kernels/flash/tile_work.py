"""Describe the task of a block for its tile of queries or keys."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.problem import BLOCK, WORD, Problem
from jfp8.kernels.flash.ring import BY_TOKEN, in_batch, with_ring
from jfp8.kernels.shared_memory import COMPUTE, staging, tile

COMPUTE_REGISTERS = 240  # of a thread that multiplies: 128 * (24 + 2 * 240) <= 65536


@dataclasses.dataclass(frozen=True)
class TileWork(abc.ABC):
    """Describe the task of a block's warpgroups for a tile of tokens of one head.

    `takes` are operands of which a warpgroup reads its own rows of the tile, and `rings` operands
    whose blocks go through a ring; both with names in `memory`.
    """

    name: ClassVar[str]  # of the kernel
    like: ClassVar[str]  # the operand whose tokens are split into tiles
    tokens: ClassVar[int] = BLOCK  # of a tile
    width: ClassVar[int]  # number of tokens of a step
    takes: ClassVar[dict[str, str]]
    slots: ClassVar[int] = 1  # number of slices of a warpgroup's results that are staged at once
    rings: ClassVar[dict[str, str]]

    p: Problem
    given: dict[str, Any]  # operands in device memory
    results: tuple[Any, ...]  # likewise
    memory: SimpleNamespace  # of the block, with the names of `scratch`
    head: jax.Array  # index of the tile's head among all heads
    row: jax.Array  # the first token of the tile
    key_head: jax.Array  # index of the tile's head of keys among all of these

    @classmethod
    def scratch(
        cls, p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
    ) -> dict[str, Any]:
        blocks: dict[str, tuple[tuple[int, ...], Any]] = {}  # of the operands, by their ring
        for name, ring in cls.rings.items():
            _, *shape = operands[name].shape
            shape[0 if name in BY_TOKEN else -1] = cls.width
            blocks[ring] = tuple(shape), operands[name].dtype
        if "bits" in operands:
            blocks["bits_ring"] = (cls.width // WORD, cls.tokens), jnp.int32
        return with_ring(cls.kept(p, operands, out_dtype) | cls.between(p), blocks)

    @classmethod
    def kept(
        cls, p: Problem, operands: dict[str, jax.Array], out_dtype: jax.typing.DTypeLike
    ) -> dict[str, Any]:
        """Return the memory that persists while the ring cycles: `takes`, and staged results."""
        rows = cls.tokens // COMPUTE
        shape = COMPUTE, rows, p.size
        found = {to: tile(shape, operands[name].dtype) for name, to in cls.takes.items()}
        copied = plgpu.Barrier(num_arrivals=len(found), num_barriers=COMPUTE)
        return found | {"staged": staging(rows, out_dtype, cls.slots), "copied": copied}

    @staticmethod
    @abc.abstractmethod
    def between(p: Problem) -> dict[str, Any]:
        """Return the memory for operands between matmuls, as a chip's tensor cores need it."""

    @classmethod
    @abc.abstractmethod
    def place(cls, p: Problem, result: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return head, row and head of keys of this block: tiles that take longest come first."""

    @abc.abstractmethod
    def copy(self) -> None:
        """Fill the ring: the task of one warpgroup."""

    def attend(self) -> None:
        """Compute half of the tile: the task of each other warpgroup, unless `run` differs."""
        raise NotImplementedError

    def run(self) -> None:
        lax.cond(lax.axis_index("warpgroup") < COMPUTE, self.attend, self.copy)

    # Operands in the ring

    @property
    def stages(self) -> int:
        """Return the number of slots of the ring."""
        return self.memory.full.shape[0]

    def bring(self, head: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Start to copy a block of tokens of `head` into a slot."""
        tokens, full = pl.ds(block * self.width, self.width), self.memory.full.at[slot]
        for name, ring in self.rings.items():
            of_head = self.given[name].at[head]
            source = of_head.at[tokens] if name in BY_TOKEN else of_head.at[..., tokens]
            plgpu.copy_gmem_to_smem(source, getattr(self.memory, ring).at[slot], full)

    def bring_bits(self, head: tuple[Any, Any], block: jax.Array, slot: jax.Array) -> None:
        """Start to copy the mask's bits for the tile and a block; `head` is a head of queries."""
        bits, words = self.given["bits"], self.width // WORD
        counts = *bits.shape[:2], bits.shape[2] // words, bits.shape[3] // self.tokens
        *at, block, n = map(_in, (*head, block, self.number()), counts)
        bits = bits.at[*at, pl.ds(block * words, words), pl.ds(n * self.tokens, self.tokens)]
        plgpu.copy_gmem_to_smem(bits, self.memory.bits_ring.at[slot], self.memory.full.at[slot])

    def seen_blocks(self, first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return ``[first, end)`` without ends that a mask hides from the whole tile."""
        if "spans" not in self.given:
            return first, end
        spans, tile = self.given["spans"], self.number()
        at = list(map(_in, in_batch(self.results[0], self.head), spans.shape))
        first = jnp.maximum(first, spans[*at, 0, tile])
        return first, jnp.maximum(first, jnp.minimum(end, spans[*at, 1, tile]))

    def number(self) -> jax.Array:
        """Return the index of this tile in its head."""
        return lax.div(self.row, self.tokens)

    # Registers of the multiplying warpgroups

    def take(self, load: Callable[[Any], Any]) -> tuple[jax.Array, jax.Array, Any]:
        """Begin the task for this warpgroup's half of the tile.

        Returns:
          The index of the half, its first row, and the result of `load` of its rows.
        """
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.axis_index("warpgroup")
        row = self.row + mine * (self.tokens // COMPUTE)
        rows, copied = pl.ds(row, self.tokens // COMPUTE), self.memory.copied.at[mine]
        for name, to in self.takes.items():
            source = self.given[name].at[self.head, rows]
            plgpu.copy_gmem_to_smem(source, getattr(self.memory, to).at[mine], copied)
        loaded = load(rows)
        plgpu.barrier_wait(copied)
        return mine, row, loaded


def _in(i: Any, n: int) -> Any:
    """Return the index of the `i`-th entry in a dimension whose size may be 1, for all."""
    return i if n > 1 else 0
