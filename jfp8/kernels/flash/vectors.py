"""Fill, load and spread vectors in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def filled(x: float | jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Return f32 of this shape, all `x`."""
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)


def load(vector: Any, layout: Any) -> jax.Array:
    """Return a vector in memory, for rows or columns."""
    return plgpu.load(vector, layout=layout, optimized=False)


def along(x: Any, shape: tuple[int, ...], dimension: int) -> Any:
    """Return a matrix that is a vector along `dimension`, constant along the other.

    A number stays as it is.
    """
    return lax.broadcast_in_dim(x, shape, (dimension,)) if getattr(x, "ndim", 0) else x
