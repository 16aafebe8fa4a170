"""Choose tiles of matmuls by a model of the device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.shared_memory import SHARED_MEMORY

# For kernels of matmuls. Pallas puts barriers of a warpgroup around each store to shared memory
# and before each copy, in case a thread reads data of others. Here none does: only copies write
# operands and scales, and results pass `commit_smem` and `wait_smem_to_gmem`, which have
# barriers, before memory is written again.
NO_OTHER_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiling of a matmul ``[M, N]``. `tile_m` and `tile_n` are multiples of 64.

    Two warpgroups take `tile_m` x `tile_n` each, one above the other. `stages` copies of 128 of K
    are in flight. Blocks that run at the same time form a rectangle, `group` tiles high, so that
    their operands stay in L2. A cluster of 2 is two blocks whose tiles are one above the other:
    they read their columns, which are the same, from L2 once for both.
    """

    tile_m: int = 64
    tile_n: int = 256
    stages: int = 4
    group: int = 16
    cluster: int = 1


class Corner(NamedTuple):
    """Locate a tile of a matmul: its first row and column, and the first column that it stores."""

    row: jax.Array
    column: jax.Array
    first: jax.Array


def store(
    parts: Iterable[jax.Array],
    slots: Any,
    out: Any,
    row: jax.Array,
    corner: Corner,
    *,
    transposed: bool = False,
) -> None:
    """Round and write slices of the columns of a tile, from `row` on, through two slots in turn.

    Others multiply meanwhile, and operands of the next tile are already copied. `slots` and `out`
    may be `transposed`.
    """
    order = slice(None, None, -1 if transposed else 1)
    rows, width = slots.shape[1:][order]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for n, part in enumerate(parts):
        slot, start = slots.at[n % 2], corner.column + n * width
        if n >= 2:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        if transposed:
            slot.T[...] = plgpu.layout_cast(part.astype(slot.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        else:
            slot[...] = part.astype(slot.dtype)
        plgpu.commit_smem()
        target = out.at[(pl.ds(row, rows), pl.ds(start, width))[order]]
        pl.when(start >= corner.first)(partial(plgpu.copy_smem_to_gmem, slot, target))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Split a matrix into tiles of `height` rows, in an order that shares operands in L2.

    The last tile of a row ends with the matrix, and so may overlap the one before it. `shape` and
    `size` count clusters of tiles.
    """

    rows: int
    columns: int
    height: int
    tiles: Tiles

    @classmethod
    def of(cls, rows: int, columns: int, height: int, tiles: Tiles) -> Grid:
        tiles = dataclasses.replace(tiles, tile_n=min(tiles.tile_n, columns))
        return cls(rows, columns, height, tiles)

    @property
    def shape(self) -> tuple[int, int]:
        height = self.height * self.tiles.cluster
        return self.rows // height, -(-self.columns // self.tiles.tile_n)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def clusters(self) -> int:
        """Return as many as the device can hold, or one for each tile of one."""
        return min(multiprocessors() // self.tiles.cluster, self.size)

    @property
    def shared(self) -> str | None:
        """Return the axis of blocks that share copies of columns, if they do."""
        return "cluster" if self.tiles.cluster > 1 else None

    def corner(self, number: jax.Array) -> Corner:
        """Locate the tile of this block, in the cluster of this `number`.

        Tiles of clusters are for kernels that are launched in clusters: others have no such axis.
        """
        group, cluster = self.tiles.group, self.tiles.cluster
        rank = lax.axis_index("cluster") if cluster > 1 else 0
        row, column = plgpu.planar_snake(number, self.shape, 0, max(1, group // cluster))
        first = column * self.tiles.tile_n
        if cluster > 1:
            row = row * cluster + rank
        return Corner(
            row * self.height, jnp.minimum(first, self.columns - self.tiles.tile_n), first
        )


Summation = Literal["running", "promoted", "block", "block_columns"]

# The widest tiles whose sums fit the registers, at 64 rows: each thread has half a tile's width of
# f32, the same again if sums are promoted, and the scales of its columns. Then the clusters and the
# groups, first those with which an H100 was faster. It ran running sums 8 % slower in clusters.
_KINDS: dict[Summation, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "running": (256, (1,), (16, 8)),
    "promoted": (192, (2, 1), (8, 16)),
    "block": (192, (2, 1), (16, 8)),
    "block_columns": (128, (2, 1), (8, 16)),
}


def multiprocessors() -> int:
    """Return the multiprocessors of the device compiled for; without one, of an H200."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


def candidates(kind: Summation) -> list[Tiles]:
    """List the tiles worth measuring: all that fit, with as many stages as fit."""
    widest, clusters, groups = _KINDS[kind]
    shapes = [(64, n) for n in range(64, widest + 1, 64)]
    shapes += [(128, 128)] if kind == "running" else []
    return [
        Tiles(m, n, _stages(kind, m, n), group, cluster)
        for (m, n), cluster, group in itertools.product(shapes, clusters, groups)
    ]


def ranked(kind: Summation, m: int, n: int, k: int) -> list[Tiles]:
    """Rank all candidates by the time that a model of the device predicts.

    A wave of tiles takes as long as the tensor cores or the shared memory need for one of them,
    plus a little for its start and end. L2 is no limit: an H100 reads 8.4 TB/s from it for running
    sums, and promoted sums, at 7.8 TB/s, are hardly faster if clusters read less. `candidates` of
    the same time keep their order.
    """

    def cycles(t: Tiles) -> float:
        rows, columns = 2 * t.tile_m, t.tile_n
        clusters = math.ceil(m / (rows * t.cluster)) * math.ceil(n / columns)
        waves = math.ceil(clusters / (multiprocessors() // t.cluster))
        # For 128 of k, of which shared memory moves a row in a cycle: it is written once, and each
        # 64 rows of wgmma read all columns.
        tensor = rows * columns * 128 / 4096
        shared = rows + columns + rows + rows // 64 * columns
        return waves * (math.ceil(k / 128) * max(tensor, shared) + 2000)

    # Without a second row of tiles, half of a cluster would multiply padding.
    fitting = [t for t in candidates(kind) if t.cluster == 1 or m > 2 * t.tile_m]
    return sorted(fitting, key=cycles)


def _stages(kind: Summation, tile_m: int, tile_n: int) -> int:
    """Return the stages that fit next to 2 x 2 staged stores of 128 bytes a row and barriers.

    Their number is a power of two: a remainder is taken in each step.
    """
    line = 132 if kind.startswith("block") else 128  # bytes of an operand's row, and its scale
    free = SHARED_MEMORY - 4 * tile_m * 128 - 2 * tile_n * 4 - 640
    return 1 << (min(8, free // ((2 * tile_m + tile_n) * line)).bit_length() - 1)
