"""Rotations of both operands along the contraction, which do not change their product.

``y = sum_k a_k b_k = sum_k (a R)_k (b R)_k`` for an orthogonal ``R``. The quantizers see other
values: an outlier is spread over the stretch of values that it is rotated with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling import printing


@dataclass(frozen=True, repr=False)
class Hadamard:
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

    __repr__ = printing.changes

    def __call__(self, x: jax.Array, axis: int) -> jax.Array:
        """Rotate `x` along `axis`; f32, padded with zeros to a multiple of ``n`` along it.

        The padding is kept, because it holds rotated values that a product over `axis` needs.
        """
        axis %= x.ndim
        n, size = len(self.signs), x.shape[axis]
        padding = [(0, -size % n if d == axis else 0) for d in range(x.ndim)]
        x = jnp.pad(x.astype(jnp.float32), padding)
        before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        stretches = x.reshape(before, x.shape[axis] // n, n, after)
        rotated = jnp.einsum(
            "bska,kr->bsra", stretches, self.matrix(), precision=lax.Precision.HIGHEST
        )
        return rotated.reshape(x.shape)

    def matrix(self) -> np.ndarray:
        """The matrix ``R = diag(s) H / sqrt(n)``: f32[n, n], orthogonal."""
        h = np.ones((1, 1))
        while len(h) < len(self.signs):
            h = np.block([[h, h], [h, -h]])
        return np.asarray(np.diag(self.signs) @ h / np.sqrt(len(h)), np.float32)
