"""Multiply tiles of f8 by tcgen05, which keeps sums in tensor memory.

A thread reads one row of tensor memory, so a reduction along a row needs no other thread. An f8
matrix in tensor memory can also be the first factor of a matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.problem import Bounds
from jfp8.kernels.shared_memory import COMPUTE, along

ROWS = 128  # rows of tensor memory, and of a multiplying warpgroup
PART = 32  # columns that are in registers at the same time

BY_ELEMENT = plgpu.Layout.TCGEN05_TMEM_NATIVE
BY_ROW = BY_ELEMENT.reduce(1)  # layout of a vector that is broadcast along the rows of a tile
BY_COLUMN = BY_ELEMENT.reduce(0)
# Four f8 values of a row form one word of tensor memory.
BY_FOUR = plgpu.Layout.TCGEN05_TMEM_NATIVE(4)


def sums(columns: int) -> Any:
    """Return tensor memory for ``f32[ROWS, columns]`` of each warpgroup that multiplies."""
    return plgpu.TMEM((ROWS, COMPUTE * columns), jnp.float32)


def factors(columns: int, dtype: jax.typing.DTypeLike) -> Any:
    """Return tensor memory for ``f8[ROWS, columns]`` of each warpgroup: a first factor."""
    return plgpu.TMEM((ROWS, COMPUTE * columns), dtype, packed=True)


def ordered() -> Any:
    """Return a barrier of each warpgroup that also orders tensor cores and threads."""
    return plgpu.Barrier(num_barriers=COMPUTE, orders_tensor_core=True)


def multiply(ready: Any, done: Any, *products: tuple[Any, Any, Any]) -> None:
    """Compute ``total = a . b^T`` for each ``(total, a, b)`` of `products`, all at once.

    One thread of the warpgroup starts them after all threads have written the factors and read
    the previous totals: `ready` and `done` are its entries of `ordered`.
    """
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    for total, a, b in products:
        plgpu.tcgen05_mma(total, a, b.T, accumulate=False)
    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)


def read(total: Any) -> jax.Array:
    """Return ``f32[ROWS, n]`` of tensor memory, in registers."""
    return plgpu.async_load_tmem(total, layout=BY_ELEMENT)


def by_parts(columns: int, f: Callable[[Any, Any], Any], start: Any) -> Any:
    """Call ``f(part, carry)`` for one slice of PART columns after another; return the last result.

    A loop: were it unrolled, the compiler would load many columns at once, and spill registers.
    """
    step = lambda n, carry: f(pl.ds(n * PART, PART), carry)
    return lax.fori_loop(0, columns // PART, step, start)


def added(total: jax.Array, products: Any, unit: jax.Array) -> jax.Array:
    """Return ``total + products * unit_i``, with `products` in tensor memory."""
    new = []
    for c in range(0, total.shape[1], PART):
        x = read(products.at[:, pl.ds(c, PART)])
        new.append(total[:, c : c + PART] + x * along(unit, x.shape, 0))
    return jnp.concatenate(new, 1)


def rearranged(memory: Any, x: jax.Array) -> jax.Array:
    """Return `x` in the layout from which threads store it to shared memory, through `memory`."""
    plgpu.wait_load_tmem()
    plgpu.async_store_tmem(memory, x)
    plgpu.commit_tmem()
    return plgpu.async_load_tmem(memory, layout=plgpu.Layout.TCGEN05)


def write(factor: Any, x: jax.Array) -> None:
    """Write `x`, rounded to the f8 of `factor`, which `multiply` can take after `commit_tmem`."""
    plgpu.async_store_tmem(factor, plgpu.layout_cast(x, BY_FOUR).astype(factor.dtype))


def write_all(factor: Any, total: Any, by: jax.Array) -> None:
    """Write ``total * by_i`` of tensor memory as the first factor of a matmul."""

    def rounded(part: Any, carry: jax.Array) -> jax.Array:
        x = read(total.at[:, part])
        write(factor.at[:, part], x * along(by, x.shape, 0))
        return carry

    by_parts(total.shape[1], rounded, jnp.int32(0))
    plgpu.commit_tmem()


def where_seen(
    bounds: Bounds, row: jax.Array, key: jax.Array, x: jax.Array, otherwise: float
) -> jax.Array:
    """Return ``x[ROWS, keys]``, and `otherwise` where a query from `row` on does not see a key."""
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BY_ELEMENT)
    query = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=BY_ROW) + (row - key)
    # One comparison for each column.
    below = lambda n: column < along(n, x.shape, 0)
    return bounds.where_seen(x, otherwise, query, key, below)
