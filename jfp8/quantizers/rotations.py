"""Rotations of both operands along the contraction, which do not change their product.

``y = sum_k a_k b_k = sum_k (a R)_k (b R)_k`` for an orthogonal ``R``. The quantizers see other
values: an outlier is spread over the stretch of values that it is rotated with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling import printing
from jfp8.scaling.random_bits import hash_bits


class Rotation:
    """Base class: an orthogonal matrix by which stretches of `size` values are multiplied."""

    __repr__ = printing.changes

    @property
    def size(self) -> int:
        """The number of values that are rotated with each other, a power of two."""
        raise NotImplementedError(f"{type(self).__name__} does not override size.")

    @property
    def random(self) -> bool:
        """Return whether the rotation depends on a seed."""
        return False

    def __call__(self, x: jax.Array, axis: int, seed: jax.Array | None = None) -> jax.Array:
        """Rotate `x` along `axis`; f32, padded with zeros to a multiple of `size` along it.

        The padding is kept, because it holds rotated values that a matmul over `axis` needs.

        Args:
          x: floating array.
          axis: the dimension that the matmul sums over.
          seed: uint32[2], the same for both operands of a matmul; for a rotation that is `random`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override __call__.")


@dataclass(frozen=True, repr=False)
class Hadamard(Rotation):
    """``x -> x diag(s) H / sqrt(n)`` on stretches of ``n`` values, with a vector of signs ``s``.

    ``H`` is Sylvester's Hadamard matrix: ``H_1 = (1)``, ``H_2n = ((H_n, H_n), (H_n, -H_n))``.

    Attributes:
      signs: fixed random signs; ``n = len(signs)`` is a power of two.

    References:
      arXiv 2509.25149 section 4.2; Transformer Engine, whose 16 signs are the default.
    """

    signs: tuple[int, ...] = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

    def __post_init__(self) -> None:
        n = len(self.signs)
        if n == 0 or n & (n - 1) or any(s not in (-1, 1) for s in self.signs):
            raise ValueError(
                f"Hadamard takes 1, 2, 4, 8, ... signs, each 1 or -1; got {self.signs!r}."
            )

    @property
    def size(self) -> int:
        return len(self.signs)

    def __call__(self, x: jax.Array, axis: int, seed: jax.Array | None = None) -> jax.Array:
        del seed
        return _along(axis, x, self.size, lambda stretches: _times(stretches, self.matrix()))

    def matrix(self) -> np.ndarray:
        """Return the matrix ``R = diag(s) H / sqrt(n)``: f32[n, n], orthogonal."""
        h = _sylvester(self.size) / np.sqrt(self.size)
        return np.asarray(np.diag(self.signs) @ h, np.float32)


@dataclass(frozen=True, repr=False)
class RandomHadamard(Rotation):
    """`Hadamard` with signs that are drawn anew for every matmul and step.

    From the key, if one was given, and in any case from the amax of the operand that is quantized
    first. Averages over rotations are then averages over steps, as unbiased estimates need them.

    Attributes:
      n: the number of values that are rotated with each other, a power of two.

    References:
      arXiv 2502.20586 section 3.2; arXiv 2601.22813, whose kernels rotate 128 values.
    """

    n: int = 128

    def __post_init__(self) -> None:
        n = self.n
        if isinstance(n, bool) or not isinstance(n, int) or n < 1 or n & (n - 1):
            raise ValueError(f"RandomHadamard(n={n!r}): must be 1, 2, 4, 8, ... values.")

    @property
    def size(self) -> int:
        return self.n

    @property
    def random(self) -> bool:
        return True

    def __call__(self, x: jax.Array, axis: int, seed: jax.Array | None = None) -> jax.Array:
        assert seed is not None  # rotations that are random always get one
        signs = jnp.where(hash_bits(seed, (1, 1, self.n, 1)) >> 31 > 0, -1.0, 1.0)
        matrix = np.asarray(_sylvester(self.n) / np.sqrt(self.n), np.float32)
        return _along(axis, x, self.n, lambda stretches: _times(stretches * signs, matrix))


def _along(axis: int, x: jax.Array, n: int, rotate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`rotate` of the stretches of `n` values along `axis`, f32[before, stretches, n, after]."""
    axis %= x.ndim
    size = x.shape[axis]
    padding = [(0, -size % n if d == axis else 0) for d in range(x.ndim)]
    x = jnp.pad(x.astype(jnp.float32), padding)
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    return rotate(x.reshape(before, x.shape[axis] // n, n, after)).reshape(x.shape)


def _times(stretches: jax.Array, matrix: np.ndarray) -> jax.Array:
    return jnp.einsum("bska,kr->bsra", stretches, matrix, precision=lax.Precision.HIGHEST)


def _sylvester(n: int) -> np.ndarray:
    """Return the Hadamard matrix: f64[n, n] of 1 and -1."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h
