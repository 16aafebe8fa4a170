"""An operand that follows element by element from others, such as an activation.

The kernel that quantizes it can make it as it reads what it is made of. Then it is never in memory.
It is an ordinary array all the same, with an ordinary gradient: where no kernel makes it, XLA does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """What an array is made of. ::

        array = make(projections[..., 0, :], projections[..., 1, :], ...)

    in f32, rounded to the dtype of `projections`.

    Attributes:
      projections: ``[..., projections, n]``, of an array ``[..., n]``.
      make: of f32 arrays, element by element. Hashable; caches know it by its ``str``.
    """

    projections: jax.Array
    make: Callable[..., jax.Array] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Made:
    """An array, and what it is made of. What is no product of jfp8 takes it as the array.

    Attributes:
      array: ``[..., n]``; gradients are its.
      source: says how to make it again; gets no gradient.
    """

    array: jax.Array
    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __jax_array__(self) -> jax.Array:
        return self.array


def split_made(x: Any) -> tuple[Any, Source | None]:
    """The array, and what it is made of, if that is known."""
    return (x.array, x.source) if isinstance(x, Made) else (x, None)


def cast_made(x: Made, array: jax.Array) -> Made | jax.Array:
    """`array`, which was made of that of `x` by a cast; what is cast is not made by a kernel."""
    return Made(array, x.source) if array.dtype == x.dtype else array


def source_of_matrix(
    source: Source, contracting: Sequence[int], shape: tuple[int, ...]
) -> Source | None:
    """Of an array that was reshaped to a matrix ``[m, k]``, to sum over k.

    None if the matrix is no reshaped array, but transposed or padded.

    Args:
      contracting: the dimensions of the array that become k.
      shape: of the matrix.
    """
    *leading, projections, k = source.projections.shape
    if tuple(contracting) != (len(leading),) or shape != (int(np.prod(leading)), k):
        return None
    rows = source.projections.reshape(shape[0], projections, k)
    return Source(lax.stop_gradient(rows), source.make)


def make_all(source: Source) -> jax.Array:
    """The array, as a kernel makes it."""
    wide = source.projections.astype(jnp.promote_types(source.projections.dtype, jnp.float32))
    parts = (wide[..., p, :] for p in range(wide.shape[-2]))
    return source.make(*parts).astype(source.projections.dtype)
