"""A kernel that is cast by its product, so that its gradient is not.

A layer with parameters in f32 that computes in bf16 casts its kernel. JAX gives the gradient of a
bf16 array in bf16, and casts it back: a rounding, and a pass over memory. Where the product casts
the kernel itself, its f32 sums are the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.products.made import Made, cast_made
from jfp8.scaling.arrays import ScaledArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CastLater:
    """``array.astype(dtype)``, for a product, which casts `array` itself.

    Attributes:
      array: f32, as its gradient.
      dtype: in which the product takes it.
    """

    array: jax.Array
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithBias:
    """A kernel, and a bias that its product shall add, which may do so before it writes its result.

    Attributes:
      kernel: ``[..., n]``.
      bias: ``[n]``, in the dtype of the product.
    """

    kernel: jax.Array | ScaledArray | CastLater
    bias: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    @property
    def ndim(self) -> int:
        return self.kernel.ndim


Kernel = jax.Array | ScaledArray | CastLater


def promoted(
    promote: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Any], later: bool = True
) -> list[Any]:
    """Inputs, a kernel and maybe a bias, as ``promote(arrays)`` casts them.

    `ScaledArray`s stay as they are, and so do inputs that are `Made`, unless they are cast. With
    `later`, a kernel in f32 that would become narrower is cast by its product.
    """
    first = arrays[0]
    if isinstance(first, Made):
        inputs, *others = promoted(promote, [first.array, *arrays[1:]], later)
        return [cast_made(first, inputs), *others]
    cast = promote([None if isinstance(x, ScaledArray) else x for x in arrays])
    both = zip(arrays, cast, strict=True)
    inputs, kernel, *bias = (x if isinstance(x, ScaledArray) else p for x, p in both)
    given = arrays[1]
    in_f32 = isinstance(given, jax.Array) and given.dtype == jnp.float32
    if later and in_f32 and kernel.dtype.itemsize < 4:
        kernel = CastLater(given, np.dtype(kernel.dtype))
    return [inputs, kernel, *bias]


def split_bias(kernel: Kernel | WithBias) -> tuple[Kernel, jax.Array | None]:
    """A kernel, and the bias that its product shall add, if there is one."""
    return (kernel.kernel, kernel.bias) if isinstance(kernel, WithBias) else (kernel, None)


def split(kernel: Kernel) -> tuple[jax.Array | ScaledArray, np.dtype | None]:
    """A kernel that is not cast yet, and the dtype to cast it to, if there is one."""
    return (kernel.array, kernel.dtype) if isinstance(kernel, CastLater) else (kernel, None)


def as_array(kernel: Kernel | Made, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The values of an operand; those of a `ScaledArray` in `dtype`."""
    if isinstance(kernel, ScaledArray):
        return kernel.dequantize(dtype)
    if isinstance(kernel, Made):
        return kernel.array
    return kernel.array.astype(kernel.dtype) if isinstance(kernel, CastLater) else kernel
