"""Pad operands to whole tiles of queries and whole blocks of keys, one head after another."""

from __future__ import annotations

import jax

from jfp8.kernels.flash.problem import BLOCK
from jfp8.kernels.shared_memory import padded


def padded_matrix(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return the operand of this name, ``[heads, tokens, size]``, or transposed if it is ``_t``."""
    tokens = _multiple(name, tile)
    x = x.reshape(-1, *x.shape[-2:])
    return padded(x, 1, 1, tokens) if name.endswith("_t") else padded(x, 1, tokens, 1)


def padded_vector(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return the operand of this name, ``[heads, tokens]``."""
    return padded(x.reshape(-1, x.shape[-1]), 1, _multiple(name, tile))


def _multiple(name: str, tile: int) -> int:
    return BLOCK if name[0] in "kv" else tile
