"""What the kernels for attention have in common on Blackwell: tensor memory, products, masks.

A block has three warpgroups. One only copies, into a ring of shared memory; the other two take 128
rows each, and go over what the ring brings. Sums of the tensor cores are in tensor memory, where a
thread reads one row of them: whatever is found along a row needs no other thread. From there, an
f8 matrix can be the first factor of a product, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.hopper.attention_parts import COMPUTE, along, tile
from jfp8.kernels.hopper.key_ranges import Bounds

ROWS = 128  # of a warpgroup that multiplies: those of tensor memory
PART = 32  # columns that are in registers at the same time

BY_ELEMENT = plgpu.Layout.TCGEN05_TMEM_NATIVE
BY_ROW = BY_ELEMENT.reduce(1)  # of a vector that is broadcast along the rows of a tile
BY_COLUMN = BY_ELEMENT.reduce(0)
# Four f8 of a row are one number of tensor memory.
BY_FOUR = plgpu.Layout.TCGEN05_TMEM_NATIVE(4)


def sums(columns: int) -> Any:
    """Tensor memory for ``f32[ROWS, columns]`` of each warpgroup that multiplies."""
    return plgpu.TMEM((ROWS, COMPUTE * columns), jnp.float32)


def factors(columns: int, dtype: jax.typing.DTypeLike) -> Any:
    """Tensor memory for ``f8[ROWS, columns]`` of each warpgroup, the first factor of a product."""
    return plgpu.TMEM((ROWS, COMPUTE * columns), dtype, packed=True)


def staging(dtype: jax.typing.DTypeLike) -> Any:
    """Where results of `dtype` wait to be copied: 128 bytes of each row, the widest swizzle."""
    return tile((COMPUTE, 1, ROWS, 128 // jnp.dtype(dtype).itemsize), dtype)


def ordered() -> Any:
    """A barrier of each warpgroup that also orders what tensor cores and threads do."""
    return plgpu.Barrier(num_barriers=COMPUTE, orders_tensor_core=True)


def multiply(ready: Any, done: Any, *products: tuple[Any, Any, Any]) -> None:
    """``total = a . b^T`` for each ``(total, a, b)`` of `products`, all at once.

    One thread of the warpgroup starts them, when all of it have written the factors, and have read
    what was in the totals: `ready` and `done` are its entries of `ordered`.
    """
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    for total, a, b in products:
        plgpu.tcgen05_mma(total, a, b.T, accumulate=False)
    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)


def release(empty: Any) -> None:
    """Says that a slot of the ring may be filled again: all have read its vectors."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(empty)


def read(total: Any) -> jax.Array:
    """``f32[ROWS, n]`` of tensor memory, in registers."""
    return plgpu.async_load_tmem(total, layout=BY_ELEMENT)


def by_parts(columns: int, f: Callable[[Any, Any], Any], start: Any) -> Any:
    """``f(part, carry)`` for one slice of PART columns after another; the last result.

    A loop: were it unrolled, the compiler would load many columns at once, and spill registers.
    """
    step = lambda n, carry: f(pl.ds(n * PART, PART), carry)
    return lax.fori_loop(0, columns // PART, step, start)


def of_rows(x: float | jax.Array) -> jax.Array:
    """f32[ROWS], all `x`."""
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)


def added(total: jax.Array, products: Any, unit: jax.Array) -> jax.Array:
    """``total + products * unit_i``: `products` are in tensor memory, the rest in registers."""
    new = []
    for c in range(0, total.shape[1], PART):
        x = read(products.at[:, pl.ds(c, PART)])
        new.append(total[:, c : c + PART] + x * along(unit, x.shape, 0))
    return jnp.concatenate(new, 1)


def rearranged(memory: Any, x: jax.Array) -> jax.Array:
    """`x`, as threads have to hold it to store it in shared memory, by way of tensor memory."""
    plgpu.wait_load_tmem()
    plgpu.async_store_tmem(memory, x)
    plgpu.commit_tmem()
    return plgpu.async_load_tmem(memory, layout=plgpu.Layout.TCGEN05)


def write(factor: Any, x: jax.Array) -> None:
    """`x`, rounded to the f8 of `factor`, in tensor memory; `multiply` waits for `commit_tmem`."""
    plgpu.async_store_tmem(factor, plgpu.layout_cast(x, BY_FOUR).astype(factor.dtype))


def rows(row: jax.Array) -> jax.Array:
    """The indices of the rows of a tile that begins at `row`: int32[ROWS]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW) + row


def where_seen(
    bounds: Bounds, row: jax.Array, key: jax.Array, x: jax.Array, otherwise: float
) -> jax.Array:
    """`x`, and `otherwise` where a query does not see a key.

    Args:
      bounds: who sees what.
      row, key: the first query, and the first key.
      x: ``f32[ROWS, keys]``.
      otherwise: a number.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BY_ELEMENT)
    query, along = rows(row - key), lambda v: lax.broadcast_in_dim(v, x.shape, (0,))
    right = 2**30 if bounds.right is None else bounds.right
    # The number of columns before the first one that is hidden: one comparison for each column.
    stop = jnp.minimum(query + (right + 1), bounds.length - key)
    x = jnp.where(column < along(stop), x, otherwise)
    if bounds.left is not None:
        x = jnp.where(column < along(query - bounds.left), otherwise, x)
    return x
