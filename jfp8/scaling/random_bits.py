"""Random bits for stochastic rounding: one hash of the element's index per element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uniform random bits, about eight times cheaper on CPU than ``jax.random.bits``.

    ``bits[i] = f(f(i + seed_0) ^ seed_1)`` with ``f`` the finalizer of MurmurHash3, ``i`` the flat
    index and the two seed words drawn from `key` by JAX's own generator. Good enough to round
    with, and reproducible; not a cryptographic generator.
    """
    return hash_bits(seed_of(key), shape)


def seed_of(key: jax.Array) -> jax.Array:
    """Return the two words that `random_bits` draws from `key`: uint32[2]."""
    return jax.random.bits(key, (2,), jnp.uint32)


def fold_in(seed: jax.Array, word: jax.Array | np.uint32) -> jax.Array:
    """Derive a seed from this one and the uint32 `word`; different words, different seeds."""
    # An int32, from jnp.arange say, would have its shifts extend the sign.
    word = _murmur3_finalizer(jnp.asarray(word).astype(jnp.uint32) ^ np.uint32(0x9E3779B9))
    return jnp.stack([_murmur3_finalizer(seed[0] ^ word), seed[1] + word])


def hash_bits(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return `random_bits` from the two seed words themselves."""
    # The flat index is built from per-axis iotas: a reshape would make a sharded array gather.
    index, word, stride = jnp.zeros(shape, jnp.uint32), seed[0], 1
    for axis in reversed(range(len(shape))):
        step = np.uint32(stride & 0xFFFFFFFF)
        if stride > 1:
            # XLA:GPU would store the first indices of rows for all arrays of a shape, and fuse what
            # reads them: moments of an optimizer would be in memory in f32, all at a time.
            step, word = lax.optimization_barrier((step, word))
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return _murmur3_finalizer(_murmur3_finalizer(index + word) ^ seed[1])


def _murmur3_finalizer(h: jax.Array) -> jax.Array:
    """The 32-bit finalizer of MurmurHash3: every input bit changes half of the output bits."""
    h = h ^ (h >> 16)
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> 13)
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
