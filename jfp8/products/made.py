"""An operand that follows element by element from others: an activation, or the gradient of one.

The kernel that quantizes it can make it as it reads what it is made of. Then it is never in memory.
It is an ordinary array all the same, with an ordinary gradient: where no kernel makes it, XLA does.

An activation knows what it is made of. The gradient that its backward pass gives to a product does
not: JAX hands on arrays. So that product returns a `Followed`, which has a second way to it::

    y = lhs . rhs       (y, slot)                          h = make(y[..., 0, :], ...)
    product  ---------------------------->  through_make  --------------------------->
             <----------------------------                <---------------------------
             dy, and in slot: y and dh                                             dh
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """What an array is made of. ::

        array = make(projections[..., 0, :], projections[..., 1, :], ..., [cotangent])

    in f32, rounded to the dtype of `projections`.

    Attributes:
      projections: ``[..., projections, n]``, of an array ``[..., n]``.
      make: of f32 arrays, element by element. Hashable; caches know it by its ``str``.
      cotangent: ``[..., n]``, if the array is that of all projections, ``[..., projections, n]``,
        of which `make` gives one after the other.
    """

    projections: jax.Array
    make: Callable[..., Any] = field(metadata={"static": True})
    cotangent: jax.Array | None = None

    def rows(self) -> Source:
        """That of the matrix with the same rows."""
        flat = lambda x, kept: x.reshape(-1, *x.shape[-kept:])
        cotangent = None if self.cotangent is None else flat(self.cotangent, 1)
        return replace(self, projections=flat(self.projections, 2), cotangent=cotangent)


@dataclass(frozen=True)
class Gradient:
    """The gradients of `make` as a function of its arguments and of a cotangent.

    Those of `make_all`, but for the sign of zeros: JAX adds up the gradients of parts of an array.
    """

    make: Callable[..., jax.Array]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        *arguments, cotangent = arrays
        return jax.vjp(self.make, *arguments)[1](cotangent)


class Then(NamedTuple):
    """What follows a product, element by element.

    Attributes:
      make: see `Source`.
      projections: how many arrays it takes, which lie side by side in the result of the product.
    """

    make: Callable[..., jax.Array]
    projections: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Made:
    """An array, and what products know of it. What is no product of jfp8 takes it as the array.

    Attributes:
      array: ``[..., n]``; gradients are its.
      source: says how to make it again, if that is known; gets no gradient.
      then: what follows the array's product, which may then return a `Followed`.
    """

    array: jax.Array
    source: Source | None = None
    then: Then | None = field(default=None, metadata={"static": True})

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

    def rows(self) -> jax.Array | Made:
        """The matrix with the same rows."""
        array = self.array.reshape(-1, self.array.shape[-1])
        return array if self.source is None else Made(array, self.source.rows())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Followed:
    """What a product returns for `through_make`, and for nothing else: it is no array.

    Attributes:
      array: ``[..., projections, n]``.
      slot: arrays of certain shapes, whose values are not used. Their cotangents are what the
        gradient of `array` is made of.
    """

    array: jax.Array
    slot: Source

    def reshape(self, shape: tuple[int, ...]) -> Followed:
        """With other dimensions in front of the last two."""
        slot = self.slot
        projections, cotangent = slot.projections.reshape(shape), slot.cotangent
        assert cotangent is not None
        cotangent = cotangent.reshape(*shape[:-2], shape[-1])
        slot = replace(slot, projections=projections, cotangent=cotangent)
        return replace(self, array=self.array.reshape(shape), slot=slot)


def followed_by(then: Then, y: jax.Array) -> Followed:
    """Return what a product returns that gives ``y[..., projections * n]``, or has these apart.

    The slot consists of parts of `y`, so that it is batched, and varies over devices, like it.
    """
    is_apart = y.ndim > 2 and y.shape[-2] == then.projections
    apart = y if is_apart else y.reshape(*y.shape[:-1], then.projections, -1)
    return Followed(apart, Source(apart, Gradient(then.make), apart[..., 0, :]))


def as_made(cotangent: Followed) -> Made:
    """Return the cotangent of what `followed_by` returned, as that of y."""
    array, source = cotangent.array, cotangent.slot
    return Made(array.reshape(*array.shape[:-2], -1), source)


@jax.custom_vjp
def through_make(x: Followed) -> jax.Array:
    """What follows `x`, ``[..., n]``; see `Made.then`.

    Its backward pass tells the product of `x` what the gradient of `x` is made of.
    """
    gradient: Any = x.slot.make
    return make_all(Source(x.array, gradient.make))


def _through_make_forward(x):
    return through_make(x), replace(x.slot, projections=x.array, cotangent=None)


def _through_make_backward(source, cotangent):
    # As by `jax.checkpoint`: what is cheap is computed again, not kept since the forward pass.
    x, dy = lax.optimization_barrier((source.projections, cotangent))
    _, back = jax.vjp(lambda x: make_all(Source(x, source.make.make)), x)
    (dx,) = back(dy)
    return (Followed(dx, replace(source, cotangent=cotangent)),)


through_make.defvjp(_through_make_forward, _through_make_backward)


def with_following(x: jax.Array, then: Then | None) -> jax.Array | Made:
    """`x` for a product that `then` follows, if anything does."""
    return x if then is None else Made(x, then=then)


def array_of(x: Any) -> Any:
    """Return the array of a `Made`; anything else as it is."""
    return x.array if isinstance(x, Made) else x


def split_made(x: Any) -> tuple[Any, Source | None, Then | None]:
    """The array, what it is made of, and what follows its product, if that is known."""
    return (x.array, x.source, x.then) if isinstance(x, Made) else (x, None, None)


def cast_made(x: Made, array: jax.Array) -> Made | jax.Array:
    """`array`, which was made of that of `x` by a cast; what is cast is not made by a kernel."""
    source = x.source if array.dtype == x.dtype else None
    return array if source is None and x.then is None else replace(x, array=array, source=source)


def source_of_matrix(
    source: Source, contracting: Sequence[int], shape: tuple[int, ...]
) -> Source | None:
    """Of an array that was reshaped to a matrix ``[m, k]``, to sum over k.

    None if the matrix is no reshaped array, but transposed or padded.

    Args:
      contracting: the dimensions of the array that become k.
      shape: of the matrix.
    """
    *leading, _, k = source.projections.shape
    if tuple(contracting) != (len(leading),) or shape != (int(np.prod(leading)), k):
        return None
    return lax.stop_gradient(source.rows())


def make_all(source: Source) -> jax.Array:
    """The array, as a kernel makes it."""
    wide = source.projections.astype(jnp.promote_types(source.projections.dtype, jnp.float32))
    parts = (wide[..., p, :] for p in range(wide.shape[-2]))
    return source.make(*parts).astype(source.projections.dtype)
