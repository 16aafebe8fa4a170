"""Polar factors of matrices by Newton-Schulz iterations, with a choice of matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.products.dot_general import scaled_dot_general
from jfp8.recipes.registry import RecipeLike, check_recipe

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
NORMS = {"frobenius": "fro", "spectral": 2, "aol": None, "schatten": None}  # to divide by at first


def matmul_in(products: RecipeLike | Literal["bf16"] | None) -> Matmul:
    """Return the matmul of stacks of f32 matrices that `products` names: see `optim.muon`."""
    numbers = (((2,), (1,)), ((0,), (0,)))
    f32 = {"preferred_element_type": jnp.float32}
    if products is None:
        return jnp.matmul
    if products == "bf16":
        half = lambda x: x.astype(jnp.bfloat16)
        return lambda x, y: jax.lax.dot_general(half(x), half(y), numbers, **f32)
    recipe = check_recipe(products)
    return lambda x, y: scaled_dot_general(x, y, numbers, recipe=recipe, **f32)


def orthogonalize(
    x: jax.Array,
    coeffs: np.ndarray,
    preconditioning: str,
    eps: jax.typing.ArrayLike,
    matmul: Matmul,
    *,
    shifted: bool,
) -> jax.Array:
    """Return nearly ``U V^T`` of each ``x = U S V^T``, f32[stack, m, n], as optax's Muon does. ::

        x <- x / |x|;    a = x x^T;    x <- c0 x + (c1 a + c2 a a) x

    Close to the end ``c1 a`` and ``c2 a a`` are large and cancel, but not the errors of matmuls in
    few bits. For these `shifted` writes the same polynomial in ``r = 1 - a``, which is small then::

        x <- (c0 + c1 + c2) x + (c2 r r - (c1 + 2 c2) r) x
    """
    turned = x.shape[1] > x.shape[2]
    x = x.swapaxes(1, 2) if turned else x
    if (order := NORMS[preconditioning]) is not None:
        x = x / (jnp.linalg.norm(x, ord=order, axis=(1, 2), keepdims=True) + eps)
    for i, (c0, c1, c2) in enumerate(coeffs):
        a = matmul(x, x.swapaxes(1, 2))
        if i == 0:
            x, a = _preconditioned(x, a, preconditioning)
        if shifted:
            r = jnp.eye(a.shape[-1], dtype=a.dtype)[None] - a
            b = c2 * matmul(r, r) - (c1 + 2 * c2) * r
            x = (c0 + c1 + c2) * x + matmul(b, x)
        else:
            b = c1 * a + matmul(c2 * a, a)
            x = c0 * x + matmul(b, x)
    return x.swapaxes(1, 2) if turned else x


def _preconditioned(x: jax.Array, a: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Divide `x` by norms that follow from ``a = x x^T``, and `a` accordingly."""
    if name == "aol":
        s = jax.lax.rsqrt(jnp.maximum(jnp.abs(a).sum(axis=-1, keepdims=True), 1e-8))
        return x * s, a * s * s.swapaxes(1, 2)
    if name == "schatten":
        s = jax.lax.rsqrt(jnp.maximum(jnp.linalg.norm(a, axis=(1, 2), keepdims=True), 1e-8))
        return x * s, a * s**2
    return x, a
