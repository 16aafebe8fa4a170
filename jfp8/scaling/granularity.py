"""Sets of elements of an array that share a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jfp8.tracing.shardings import explicit_sharding, sharded_like, shards_along


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array (0-d)."""


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index along `axis`: shape ``n`` there and 1 everywhere else.

    Attributes:
      axis: one axis or several, negative ones counted from the end. ``PerAxis(0)`` of an array of
        shape ``(8, 16)`` gives scales of shape ``(8, 1)``: one per row.
    """

    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
            raise TypeError(f"PerAxis takes an int or a tuple of ints, got {self.axis!r}.")


@dataclass(frozen=True)
class Block:
    """One scale per block of `shape`, which covers the trailing dimensions of the array.

    Attributes:
      shape: block sizes; ``Block((1, 128))`` of an array of shape ``(64, 256)`` gives ``(64, 2)``
        scales. Dimensions to the left of it have blocks of 1. The last block of a dimension may be
        shorter than the others; it gets the scale that padding it with zeros would give.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, tuple) or not all(isinstance(b, int) and b > 0 for b in shape):
            raise TypeError(f"Block takes a tuple of positive ints, got {shape!r}.")


Granularity: TypeAlias = PerTensor | PerAxis | Block


def scale_shape(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of an array of `shape`.

    Args:
      granularity: the elements that share a scale.
      shape: the array's shape.

    Returns:
      ``()`` for `PerTensor`; else a tuple of the length of `shape`.

    Raises:
      ValueError: the axis does not exist, or a block has more dimensions than the array.
      TypeError: not a granularity.
    """
    ndim = len(shape)
    if isinstance(granularity, PerTensor):
        return ()
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"{granularity} names an axis that an array of shape {tuple(shape)} does not "
                    f"have; allowed are {-ndim} to {ndim - 1}."
                )
        kept = {axis % ndim for axis in axes}
        return tuple(n if i in kept else 1 for i, n in enumerate(shape))
    if isinstance(granularity, Block):
        return tuple(-(-n // b) for n, b in zip(shape, block_shape(granularity, ndim), strict=True))
    raise TypeError(
        f"granularity must be PerTensor(), PerAxis(axis) or Block(shape); got {granularity!r}."
    )


def block_shape(granularity: Block, ndim: int) -> tuple[int, ...]:
    """Return the size of a block along each of `ndim` dimensions."""
    if len(granularity.shape) > ndim:
        raise ValueError(
            f"{granularity} has {len(granularity.shape)} dimensions, but the array only {ndim}."
        )
    return (1,) * (ndim - len(granularity.shape)) + granularity.shape


def ragged_block(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return `ScaledArray.block` for an array of `shape`: None unless a block is cut short."""
    if not isinstance(granularity, Block):
        return None
    block = block_shape(granularity, len(shape))
    return block if any(n % b for n, b in zip(shape, block, strict=True)) else None


Reduction = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def over_blocks(reduce: Reduction, x: jax.Array, granularity: Granularity) -> jax.Array:
    """Reduce each set of elements of `x` that share a scale, to the shape of the scales.

    Args:
      reduce: a function of an array and axes, such as ``lax.reduce_max``, which may be applied to
        parts of a set and then to the results. The function defines the result of an empty set.
      x: integers, whose maxima and sums do not depend on the order; short blocks are padded with 0.
      granularity: the elements that share a scale.
    """
    if isinstance(granularity, PerTensor):
        return reduce(x, tuple(range(x.ndim)))
    return _over_blocks(reduce, x, granularity)


@partial(jax.jit, static_argnums=(0, 2))
def _over_blocks(reduce: Reduction, x: jax.Array, granularity: Granularity) -> jax.Array:
    def reduced(x: jax.Array) -> jax.Array:
        out_shape, block = scale_shape(granularity, x.shape), ragged_block(granularity, x.shape)
        if block is not None:
            x = jnp.pad(x, [(0, -n % b) for n, b in zip(x.shape, block, strict=True)])
        # A dimension of size 0 has no blocks, or (PerAxis of another dimension) an empty one.
        pairs = zip(x.shape, out_shape, strict=True)
        blocked = [part for n, m in pairs for part in (m, n // m if m else 0)]
        axes = tuple(range(1, 2 * x.ndim, 2))
        if not blocked or blocked[-1] % 8:
            return reduce(x.reshape(blocked), axes)
        # Along the fastest dimension in two steps, the first of which XLA:CPU does in vectors.
        blocked[-1:] = [blocked[-1] // 8, 8]
        return reduce(reduce(x.reshape(blocked), axes), (x.ndim,))

    return sharded_like(x, reduced, x)


def check_whole_blocks(granularity: Granularity, x: jax.Array) -> None:
    """Raise ``ValueError`` if explicit axes of the mesh cut blocks of `x`."""
    sharding = explicit_sharding(x)
    if sharding is None or not isinstance(granularity, Block):
        return
    sizes, shards = block_shape(granularity, x.ndim), shards_along(sharding, x.ndim)
    for axis, (n, k, b) in enumerate(zip(x.shape, shards, sizes, strict=True)):
        if k > 1 and n > b and (n // k) % b:
            raise ValueError(
                f"An array of shape {x.shape} has {k} shards of {n // k} elements along axis "
                f"{axis}, but blocks of {b} share a scale there. Over explicit axes of the mesh, "
                f"shards consist of whole blocks: give the axis a multiple of {k * b} elements, "
                "shard another axis, or create the mesh with axis_types="
                "(jax.sharding.AxisType.Auto,), where blocks may extend over several devices."
            )
