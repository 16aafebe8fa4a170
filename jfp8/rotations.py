"""Rotations of both operands of a product along its contraction, which leave the product alone.

``y = sum_k a_k b_k = sum_k (a R)_k (b R)_k`` for an orthogonal ``R``. What changes is what a
quantizer sees: an outlier is spread over the block that it is rotated with.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Hadamard:
    """``x -> x diag(s) H / sqrt(n)`` on stretches of ``n`` values, ``s`` a vector of signs.

    ``H`` is Sylvester's Hadamard matrix: ``H_1 = (1)``, ``H_2n = ((H_n, H_n), (H_n, -H_n))``.
    Computed in f32 by ``log2(n)`` rounds of sums and differences, without a matrix product.

    Attributes:
      signs: the random signs, drawn once and for all; ``n = len(signs)`` is a power of two.

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

    def __call__(self, x: jax.Array, axis: int) -> jax.Array:
        """Rotate `x` along `axis`; f32, padded with zeros to a multiple of ``n`` along it.

        The padding stays, since rotated values stand in it: a product over `axis` needs them.
        """
        n, size = len(self.signs), x.shape[axis]
        padding = [(0, -size % n if d == axis else 0) for d in range(x.ndim)]
        x = jnp.pad(x.astype(jnp.float32), padding)
        shape = x.shape
        before, after = shape[:axis], shape[axis + 1 :]
        signs = np.asarray(self.signs, np.float32) / np.float32(np.sqrt(n))
        x = x.reshape(*before, shape[axis] // n, n, *after)
        x = x * signs.reshape([n if d == axis + 1 else 1 for d in range(x.ndim)])
        stretches = x.shape
        half = n // 2
        while half:
            # Index (..., a, 2, half, ...): the two parts of every sum and difference.
            x = x.reshape(*stretches[: axis + 1], n // (2 * half), 2, half, *after)
            first, second = (lax.index_in_dim(x, i, axis + 2, keepdims=False) for i in (0, 1))
            x = jnp.stack([first + second, first - second], axis=axis + 2)
            half //= 2
        return x.reshape(shape)
