"""Gradients of attention of f8 matrices on Hopper: the calls of two kernels, and their rule."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.hopper import attention_dkv, attention_dq
from jfp8.kernels.hopper.attention import of_hidden, of_keys
from jfp8.kernels.hopper.attention_dkv import QUERIES
from jfp8.kernels.hopper.attention_parts import BLOCK, COMPUTE, ROWS, heads_first, launch
from jfp8.kernels.hopper.mask_bits import packed
from jfp8.kernels.hopper.tiles import padded
from jfp8.scaling.formats import Format

SIZES = (64, 128)  # of a head


class Stored(NamedTuple):
    """The f8 matrices, each as its products take it: the contraction last.

    Attributes:
      q, grad: ``f8[..., G, T, H]``, for S and for dP.
      k, v: ``f8[..., G / groups, S, H]``, for S and for dP.
      q_t, grad_t: ``f8[..., G, H, T]``, for dK and for dV.
      k_t: ``f8[..., G / groups, H, S]``, for dQ.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    q_t: jax.Array
    k_t: jax.Array
    grad_t: jax.Array


class Vectors(NamedTuple):
    """Numbers of each query and key, f32.

    Attributes:
      q, grad: scales of these matrices of `Stored`, ``[..., G, T]``.
      k, v: likewise, ``[..., G / groups, S]``.
      q_t, grad_t: likewise, ``[..., G, T]``.
      k_t: likewise, ``[..., G / groups, S]``.
      log_sum: `lse` of the forward pass, ``[..., G, T]``.
      dot: ``sum_h dO O``, ``[..., G, T]``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    grad: jax.Array
    q_t: jax.Array
    k_t: jax.Array
    grad_t: jax.Array
    log_sum: jax.Array
    dot: jax.Array


def attention_backward(
    stored: Stored,
    vectors: Vectors,
    key_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
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

    See `attention_dq` and `attention_dkv` for the equations.

    Args:
      stored, vectors: see there.
      key_lengths, mask: ``i32[..., G / groups]``, ``bool[... | 1, G | 1, T | 1, S | 1]``, as of
        `attention_forward`; so are the next four.
      groups, scale, is_causal, window: see above.
      formats: of dS in dQ and in dK: E4M3FN or E5M2.
      out_dtype: of dQ, dK and dV.
      interpret: for ``plgpu.kernel``.

    Returns:
      ``out_dtype[..., G, T, H]``, ``out_dtype[..., G / groups, S, H]`` twice, ``f32[..., G, T]``.

    Raises:
      ValueError: H is neither 64 nor 128.
    """
    (*_, rows, size), keys = stored.q.shape, stored.k.shape[-2]
    if size not in SIZES:
        raise ValueError(
            f"the kernels of the backward pass take heads of 64 or 128 numbers, not {size}: pad "
            "queries, keys, values and gradients with zeros."
        )
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

    def run(
        module: Any, like: str, tiles: int, bits: dict[str, jax.Array], but: tuple[str, ...]
    ) -> Any:
        name = module.__name__.rpartition(".")[2]
        given = {n: x for n, x in operands.items() if n not in but} | bits
        heads, tokens, _ = given[like].shape
        n = getattr(stored, like).shape[-3]
        gradient = jax.ShapeDtypeStruct((heads // n, tokens, n, size), out_dtype)
        largest = jax.ShapeDtypeStruct((heads, tokens), jnp.float32)
        out_type = [gradient, largest if like == "q" else gradient]
        kernel = functools.partial(module.kernel, problem, tuple(given))
        scratch = module.scratch(problem, given, out_dtype)
        return launch(kernel, name, (heads // n, n * tiles), given, out_type, scratch, interpret)

    by_query, by_key = {}, {}
    if mask is not None:
        mask = mask.reshape(-1, *mask.shape[-3:])
        by_query = packed(mask, (rows, keys), 3, BLOCK)
        by_key = packed(mask, (rows, keys), 2, QUERIES, groups)
    without = "q_t", "grad_t", "unit"
    dq, largest = run(attention_dq, "q", problem.tiles, by_query, without)
    tiles = operands["k"].shape[1] // (COMPUTE * ROWS)
    found = run(attention_dkv, "k", tiles, by_key, ("k_t", "key_lengths"))
    dk, dv = (without_padding(heads_first(x, stored.k.shape), key_lengths) for x in found)
    largest = largest[:, :rows].reshape(stored.q.shape[:-1])
    return heads_first(dq, stored.q.shape), dk, dv, largest


def without_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``x[..., S, H]``, and zeros from ``lengths[...]`` on."""
    if lengths is None:
        return x
    real = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2) < lengths[..., None, None]
    return jnp.where(real, x, 0)


def division(
    groups: int, *, key_lengths: jax.Array | None = None, mask: jax.Array | None = None
) -> str:
    """How devices may divide `attention_backward`: by sequences and heads, ``[B, N, T, H]``.

    A rule for `tracing.divided`, with the leaves of its operands; see that of `attention`.
    """
    q, k = "b n", of_keys(groups)
    tokens = [f"{k} S" if name[0] in "kv" else f"{q} T" for name in Stored._fields]
    matrices = [
        f"{axes[:-1]}H {axes[-1]}" if name.endswith("_t") else f"{axes} H"
        for name, axes in zip(Stored._fields, tokens, strict=True)
    ]
    operands = [*matrices, *tokens, f"{q} T", f"{q} T", *of_hidden(groups, key_lengths, mask)]
    return f"{', '.join(operands)} -> {q} T H, {k} S H, {k} S H, {q} T"


def _operands(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float
) -> dict[str, jax.Array]:
    """What the kernels take, by the names that they have there: one head after another, padded."""
    found = {}
    for name, x in stored._asdict().items():
        transposed = name.endswith("_t")
        x = x.reshape(-1, *x.shape[-2:])
        found[name] = padded(x, 1, 1, BLOCK) if transposed else padded(x, 1, BLOCK, 1)
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, and so has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % BLOCK)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, without which they become weights.
    grad_t = padded(v.grad_t, 1, BLOCK)
    in_blocks = grad_t.reshape(len(grad_t), -1, QUERIES)
    largest = jnp.max(in_blocks, axis=2, keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    found["unit"] = largest[:, :, 0] * 2.0**-8
    weights = (in_blocks / largest * 2.0**8).reshape(grad_t.shape)
    rows = [padded(x, 1, BLOCK) for x in (v.q * (scale * math.log2(math.e)), v.grad, v.dot, v.q_t)]
    factor, grad, dot, q_t = rows
    found["by_query"] = jnp.stack([factor, of_sum, grad, dot, weights, q_t], 1)
    found["by_key"] = jnp.stack([padded(x, 1, BLOCK) for x in (v.k, v.v, v.k_t)], 1)
    if key_lengths is not None:
        found["key_lengths"] = key_lengths.reshape(-1)
    return found
