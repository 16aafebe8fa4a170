"""Seeds of random bits and rotations, made from the data and from the user's key."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.recipes.product import Product
from jfp8.scaling.random_bits import fold_in


def seed_for(use: str, amax: jax.Array, seed: jax.Array | None) -> jax.Array:
    """Return a separate seed for each `use` of each tensor, step, scan iteration, batch and device.

    No counter has to be threaded through transformations for that: wherever seeds must differ, the
    data does, and so does its amax. The user's seed separates cases of equal data.
    """
    if seed is None:
        seed = jnp.zeros((2,), jnp.uint32)
    word = np.uint32(zlib.crc32(use.encode()))
    return fold_in(seed, lax.bitcast_convert_type(amax, jnp.uint32) ^ word)


def rotation_seed(
    product: Product, kind: str, amax: jax.Array, seed: jax.Array | None
) -> jax.Array | None:
    """Return the seed of a random rotation of both operands, from the `amax` of one, or None."""
    if product.rotation is None or not product.rotation.random:
        return None
    return seed_for(f"{kind} rotation", amax, seed)
