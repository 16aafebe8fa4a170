"""Gradients of attention of f8 matrices on Blackwell: the calls of two kernels, and their rule."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.blackwell import attention_dkv, attention_dq
from jfp8.kernels.blackwell.attention_dkv import QUERIES
from jfp8.kernels.blackwell.attention_parts import ROWS
from jfp8.kernels.hopper.attention_backward import Stored, Vectors, without_padding
from jfp8.kernels.hopper.attention_parts import BLOCK, COMPUTE, heads_first, launch
from jfp8.kernels.hopper.tiles import padded
from jfp8.scaling.formats import Format


def attention_backward(
    stored: Stored,
    vectors: Vectors,
    key_lengths: jax.Array | None = None,
    *,
    groups: int,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    formats: tuple[Format, Format],
    out_dtype: jax.typing.DTypeLike,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dQ, dK and dV, and the largest ``|dS|`` of each query.

    See `attention_dq` and `attention_dkv` for the equations, and
    `jfp8.kernels.hopper.attention_backward` for arguments and results: they are the same, with H of
    64 or 128.
    """
    (*_, rows, size), keys = stored.q.shape, stored.k.shape[-2]
    operands = _operands(stored, vectors, key_lengths, scale)
    left, right = window or (None, None)
    problem = attention_dq.Problem(
        rows=operands["q"].shape[1],
        keys=keys,
        size=size,
        groups=groups,
        left=left,
        right=0 if is_causal else right,
        scale=scale,
        formats=formats,
    )

    def run(module: Any, name: str, like: str, tiles: int, but: tuple[str, ...]) -> Any:
        given = {n: x for n, x in operands.items() if n not in but}
        heads, tokens, _ = given[like].shape
        n = getattr(stored, like).shape[-3]
        gradient = jax.ShapeDtypeStruct((heads // n, tokens, n, size), out_dtype)
        largest = jax.ShapeDtypeStruct((heads, tokens), jnp.float32)
        out_type = [gradient, largest if like == "q" else gradient]
        kernel = functools.partial(module.kernel, problem, tuple(given))
        scratch = module.scratch(problem, given, out_dtype)
        return launch(kernel, name, (heads // n, n * tiles), given, out_type, scratch, interpret)

    without = "q_t", "grad_t", "unit"
    dq, largest = run(attention_dq, "attention_dq_blackwell", "q", problem.tiles, without)
    tiles = operands["k"].shape[1] // ROWS
    found = run(attention_dkv, "attention_dkv_blackwell", "k", tiles, ("k_t", "key_lengths"))
    dk, dv = (without_padding(heads_first(x, stored.k.shape), key_lengths) for x in found)
    largest = largest[:, :rows].reshape(stored.q.shape[:-1])
    return heads_first(dq, stored.q.shape), dk, dv, largest


def _operands(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float
) -> dict[str, jax.Array]:
    """What the kernels take, by the names that they have there: one head after another, padded."""
    of_queries, of_keys = COMPUTE * ROWS, BLOCK
    found = {}
    for name, x in stored._asdict().items():
        tokens = of_keys if name[0] in "kv" else of_queries
        x = x.reshape(-1, *x.shape[-2:])
        found[name] = padded(x, *((1, 1, tokens) if name.endswith("_t") else (1, tokens, 1)))
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, and so has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % of_queries)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, without which they become weights.
    grad_t = padded(v.grad_t, 1, of_queries)
    in_blocks = grad_t.reshape(len(grad_t), -1, QUERIES)
    largest = jnp.max(in_blocks, axis=2, keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    found["unit"] = largest[:, :, 0] * 2.0**-8
    weights = (in_blocks / largest * 2.0**8).reshape(grad_t.shape)
    by_query = v.q * (scale * math.log2(math.e)), v.grad, v.dot, v.q_t
    factor, grad, dot, q_t = (padded(x, 1, of_queries) for x in by_query)
    found["by_query"] = jnp.stack([factor, of_sum, grad, dot, weights, q_t], 1)
    found["by_key"] = jnp.stack([padded(x, 1, of_keys) for x in (v.k, v.v, v.k_t)], 1)
    if key_lengths is not None:
        found["key_lengths"] = key_lengths.reshape(-1)
    return found
