"""What the three kernels for attention have in common: their threads, the ring, vectors, results.

A block has three warpgroups. One only copies, into a ring of shared memory; the other two take 64
rows each, and go over what the ring brings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.tiles import swizzled

BLOCK = 128  # keys of a step
COMPUTE = 2  # warpgroups that multiply; the one after them copies
ROWS = 64  # of each
MEMORY_REGISTERS, COMPUTE_REGISTERS = 24, 240  # per thread: 128 * (24 + 2 * 240) <= 65536

BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # of a vector that is broadcast along the rows of a tile
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# No barriers but those of the code, as for products: see `tiles.NO_OTHER_BARRIERS`. A warp writes
# and multiplies its own rows. exp2 is one instruction, off by 2^-22 at most.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


def launch(
    kernel: Callable[..., None],
    name: str,
    blocks: tuple[int, int],
    operands: dict[str, jax.Array],
    out_type: list[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    interpret: Any,
) -> Any:
    """Results of ``kernel(*operands, *out, **scratch)``, by `blocks` of each batch."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=blocks,
        grid_names=("batch", "tile"),
        cluster=(1,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name=f"jfp8_{name}",
    )(*operands.values())


# Shared memory


def tile(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """A tile that copies and tensor cores take."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, shape[-1]))


def staging(slots: int, dtype: jax.typing.DTypeLike) -> Any:
    """Where results of `dtype` wait to be copied: 128 bytes of each row, the widest swizzle."""
    return tile((COMPUTE, slots, ROWS, 128 // jnp.dtype(dtype).itemsize), dtype)


def freed(stages: int) -> Any:
    """Barriers at which a slot of the ring is free."""
    # One thread of a warpgroup arrives at a barrier of a cluster, all 128 at a plain one.
    return plgpu.ClusterBarrier(
        collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=stages
    )


def fill(steps: jax.Array, stages: int, empty: Any, copy: Callable[[Any, Any], None]) -> None:
    """``copy(i, slot)`` for each step, when its slot is free. All of one warpgroup."""
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


# Registers


def zeros(width: int) -> jax.Array:
    """f32[ROWS, width]."""
    return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)


def of_rows(x: float | jax.Array) -> jax.Array:
    """f32[ROWS], all `x`."""
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)


def load(vector: Any, layout: Any) -> jax.Array:
    """A vector in memory, for rows or columns."""
    return plgpu.load(vector, layout=layout, optimized=False)


def along(x: Any, shape: tuple[int, ...], dimension: int) -> Any:
    """A vector along `dimension` of a matrix, constant along the other; a number as it is."""
    return lax.broadcast_in_dim(x, shape, (dimension,)) if getattr(x, "ndim", 0) else x


def multiply(*pairs: tuple[Any, Any]) -> list[jax.Array]:
    """``a . b^T`` in f32 of each pair of tiles ``[ROWS, k]`` and ``[n, k]``, all at once."""

    def products(*sums: Any) -> list[jax.Array]:
        for total, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, a, b.T)
        return [total[...] for total in sums]

    return pl.run_scoped(products, *(plgpu.ACC((ROWS, b.shape[0]), jnp.float32) for _, b in pairs))


def place(result: Any, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Which of all ``B N`` heads is this block's, and which of the tiles of that.

    `result` is ``[B, T, N, H]``.
    """
    at = lax.axis_index("tile")
    head = lax.axis_index("batch") * result.shape[2] + lax.div(at, tiles)
    return head, lax.rem(at, tiles)


def in_batch(result: Any, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The batch of this block, and which of its heads `head` is."""
    batch = lax.axis_index("batch")
    return batch, head - batch * result.shape[2]


def head_of(result: Any, head: jax.Array) -> Any:
    """Of a result ``[B, T, N, H]``, the ``[T, H]`` of this block's head."""
    batch, n = in_batch(result, head)
    return result.at[batch, :, n]


def heads_first(result: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A result ``[B, T', N, H]``, padded, as ``[..., N, T, H]``. XLA does it with what follows."""
    return result[:, : shape[-2]].swapaxes(1, 2).reshape(shape)


def store(parts: list[jax.Array], staged: Any, target: Any) -> None:
    """Columns of a result, rounded, to memory by way of the slots of `staged`."""
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
