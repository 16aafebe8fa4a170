"""Prepare the operands of the kernels of the backward pass: one head after another, padded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.flash.operands import Stored, Vectors
from jfp8.kernels.flash.padding import padded_matrix
from jfp8.kernels.flash.problem import BLOCK, QUERIES
from jfp8.kernels.shared_memory import padded


def backward_operands(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float, tile: int
) -> dict[str, jax.Array]:
    """Return what the kernels take, by the names that it has there; `tile` is one of queries."""
    found = {name: padded_matrix(name, x, tile) for name, x in stored._asdict().items()}
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, and so has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % tile)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, without which they become weights.
    grad_t = padded(v.grad_t, 1, tile)
    in_blocks = grad_t.reshape(len(grad_t), -1, QUERIES)
    largest = jnp.max(in_blocks, axis=2, keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    found["unit"] = largest[:, :, 0] * 2.0**-8
    weights = (in_blocks / largest * 2.0**8).reshape(grad_t.shape)
    by_query = v.q * (scale * math.log2(math.e)), v.grad, v.dot, v.q_t
    factor, grad, dot, q_t = (padded(x, 1, tile) for x in by_query)
    found["by_query"] = jnp.stack([factor, of_sum, grad, dot, weights, q_t], 1)
    found["by_key"] = jnp.stack([padded(x, 1, BLOCK) for x in (v.k, v.v, v.k_t)], 1)
    if key_lengths is not None:
        found["key_lengths"] = key_lengths.reshape(-1)
    return found
