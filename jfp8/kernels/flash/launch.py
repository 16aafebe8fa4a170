"""Call the kernels of attention, forward and backward: over all tiles of all heads."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.kernels.flash.problem import BLOCK, QUERIES, WORD, Problem, Stored, Vectors, window_of
from jfp8.kernels.flash.ring import BY_TOKEN, heads_first
from jfp8.kernels.flash.tile_work import TileWork
from jfp8.kernels.flash.tiles import KeyTile, QueryTile
from jfp8.kernels.shared_memory import COMPUTE, padded
from jfp8.scaling.formats import Format

# No barriers except explicit ones, as for matmuls: see `tiles.NO_OTHER_BARRIERS`. A warp writes
# and multiplies its own rows. exp2 is one instruction, with an error of at most 2^-22.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


def attention_forward(
    work: type[QueryTile],
    q: jax.Array,
    k: jax.Array,
    v_t: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    key_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    groups: int,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``o = softmax(scale * q k^T) v`` and the logarithm of the softmax's denominator.

    See `ForwardTile` for the equations. A row that sees no key gets ``o = 0`` and ``lse = -inf``.
    Keys that a row does not see do not change its bits, unless one of their values, or its scale,
    is Inf or NaN.

    Args:
      q: ``f8[..., G, T, H]``; see `attention.Pallas` for the supported H and masks.
      k, v_t: ``f8[..., G / groups, S, H]`` and ``f8[..., G / groups, H, S]``.
      q_scale, k_scale: ``f32[..., G, T]`` and ``f32[..., G / groups, S]``, positive.
      v_scale: ``f32[..., G / groups, S]``, powers of two from 2^-90 to 2^100.
      key_lengths: ``i32[..., G / groups]``.
      mask: ``bool[... | 1, G | 1, T | 1, S | 1]``, True for visible keys.
      scale: of the logits, positive.
      window: ``(left, right)``: visible if ``i - left <= j <= i + right``. None for no bound.
      out_dtype: f32, bf16 or f16, to which `o` is rounded once.

    Returns:
      ``out_dtype[..., G, T, H]`` and ``f32[..., G, T]``.
    """
    shape, (*_, rows, size), keys = q.shape, q.shape, k.shape[-2]
    if 0 in (*shape, keys):
        return jnp.zeros(shape, out_dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    given = {"q": q, "k": k, "v_t": v_t} | scales
    operands = {name: _padded_operand(name, x, work.tokens) for name, x in given.items()}
    if key_lengths is not None:
        operands["key_lengths"] = key_lengths.reshape(-1)
    if mask is not None:
        operands |= packed(mask, (rows, keys), 3, (work.tokens, BLOCK))
    bounds = window_of(is_causal, window)
    problem = Problem(operands["q"].shape[1], keys, size, groups, scale, *bounds)
    o, lse = _launch(work, problem, operands, shape[-3], out_dtype)
    return heads_first(o, shape), lse[:, :rows].reshape(shape[:-1])


def attention_backward(
    of_queries: type[QueryTile],
    of_keys: type[KeyTile],
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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute dQ, dK and dV, and the largest ``|dS|`` of each query.

    See `BackwardTile` and `KeyTile` for the equations, `attention_forward` for other arguments.

    Args:
      of_queries, of_keys: the task of a block of the kernels for dQ, and for dK and dV.
      formats: of dS in dQ and in dK: E4M3FN or E5M2.

    Returns:
      ``out_dtype[..., G, T, H]``, ``out_dtype[..., G / groups, S, H]`` twice, ``f32[..., G, T]``.
    """
    (*_, rows, size), keys = stored.q.shape, stored.k.shape[-2]
    operands = _prepared(stored, vectors, key_lengths, scale, of_queries.tokens)
    bounds = window_of(is_causal, window)
    problem = Problem(operands["q"].shape[1], keys, size, groups, scale, *bounds, formats)

    def run(work: Any, bits: dict[str, jax.Array], *but: str) -> Any:
        given = {name: x for name, x in operands.items() if name not in but} | bits
        heads = getattr(stored, work.like).shape[-3]
        return _launch(work, problem, given, heads, out_dtype)

    by_query, by_key = {}, {}
    if mask is not None:
        by_query = packed(mask, (rows, keys), 3, (of_queries.tokens, of_queries.width))
        by_key = packed(mask, (rows, keys), 2, (of_keys.tokens, of_keys.width), groups)
    dq, largest = run(of_queries, by_query, "q_t", "grad_t", "unit")
    found = run(of_keys, by_key, "k_t", "key_lengths")
    dk, dv = (heads_first(x, stored.k.shape) for x in found)
    if key_lengths is not None:  # padded keys have values, too
        real = lax.broadcasted_iota(jnp.int32, dk.shape, dk.ndim - 2) < key_lengths[..., None, None]
        dk, dv = jnp.where(real, dk, 0), jnp.where(real, dv, 0)
    largest = largest[:, :rows].reshape(stored.q.shape[:-1])
    return heads_first(dq, stored.q.shape), dk, dv, largest


def _prepared(
    stored: Stored, vectors: Vectors, key_lengths: jax.Array | None, scale: float, tile: int
) -> dict[str, jax.Array]:
    """Return the kernels' operands by name; `tile` is one of queries."""
    found = {name: _padded_operand(name, x, tile) for name, x in stored._asdict().items()}
    v = Vectors(*(x.reshape(-1, x.shape[-1]) for x in vectors))
    # A row of a query that sees no key has p = exp2(s - inf) = 0, as has padding.
    of_sum = jnp.where(v.log_sum == -jnp.inf, jnp.inf, v.log_sum * math.log2(math.e))
    missing = [(0, 0), (0, -of_sum.shape[1] % tile)]
    of_sum = jnp.pad(of_sum, missing, constant_values=np.inf)
    # The largest scale of a block of gradients, by which they are divided to become weights.
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


def _launch(
    work: type[TileWork],
    p: Problem,
    operands: dict[str, jax.Array],
    heads: int,
    out_dtype: jax.typing.DTypeLike,
) -> list[jax.Array]:
    """Return ``out_dtype[batches, tokens, heads, size]``, and another or ``f32[heads, tokens]``.

    `operands` have all heads concatenated; `heads` is the number of `work.like` in one batch.
    """

    def kernel(*refs: Any, **memory: Any) -> None:
        given, results = dict(zip(operands, refs, strict=False)), refs[len(operands) :]
        work(p, given, results, SimpleNamespace(**memory), *work.place(p, results[0])).run()

    n, tokens, _ = operands[work.like].shape
    matrix = jax.ShapeDtypeStruct((n // heads, tokens, heads, p.size), out_dtype)
    vector = jax.ShapeDtypeStruct((n, tokens), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=[matrix, vector if work.like == "q" else matrix],
        grid=(n // heads, heads * (tokens // work.tokens)),
        grid_names=("batch", "tile"),
        cluster=(1,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=work.scratch(p, operands, out_dtype),
        compiler_params=PARAMS,
        kernel_name=f"jfp8_{work.name}",
    )(*operands.values())


def _padded_operand(name: str, x: jax.Array, tile: int) -> jax.Array:
    """Return ``[heads, tokens, size]``, transposed if the name is ``_t``; scales without `size`."""
    tokens = BLOCK if name[0] in "kv" else tile
    x = x.reshape(-1, *x.shape[-1 if name.endswith("_scale") else -2 :])
    return padded(x, 1, tokens, 1) if name in BY_TOKEN else padded(x, *(1,) * (x.ndim - 1), tokens)


def packed(
    mask: jax.Array, shape: tuple[int, int], columns: int, sizes: tuple[int, int], groups: int = 1
) -> dict[str, jax.Array]:
    """Return the bits of a mask, and which blocks of columns a tile visits. ::

        bits[b, n, c // 32, r] >> (c % 32) & 1    1 if row r sees column c
        spans[b, n, :, t]    first block of which tile t of rows sees a column, and the end

    Rows and columns are queries and keys, or, of transposed scores, keys and queries. Words of 32
    columns are contiguous for all rows, as a block copies them: an eighth of a byte for a score. A
    dimension along which a mask is constant is no longer than a tile, or the columns of a step.

    Args:
      mask: ``bool[... | 1, N | 1, T | 1, S | 1]``.
      shape: T and S.
      columns: the dimension of `mask` with the columns of the kernel: 3, keys, or 2, queries.
      sizes: rows of a tile, and columns of a step, a multiple of 32.
      groups: number of heads that the kernel visits for a tile, which share a span.

    Returns:
      ``bits``: ``i32[B | 1, N | 1, columns' / 32, rows']``, of whole blocks and tiles, or of one
      if the mask is the same for all columns or rows. ``spans``: ``i32[B | 1, N / groups | 1, 2,
      tiles]``.
    """
    mask, (tile, width) = mask.reshape(-1, *mask.shape[-3:]), sizes
    parts = sizes if columns == 3 else (width, tile)
    one = [n if n > 1 else part for n, part in zip(mask.shape[2:], parts, strict=True)]
    mask = padded(jnp.broadcast_to(mask, (*mask.shape[:2], *one)), 1, 1, *parts)
    words = mask.reshape(*mask.shape[:columns], -1, WORD, *mask.shape[columns + 1 :])
    # XLA packs the result of a select in one pass, but writes integers of a conversion to memory.
    bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, words.shape, columns + 1)
    bits = jnp.sum(jnp.where(words, bit, 0), axis=columns + 1, dtype=jnp.int32)
    bits = bits if columns == 2 else bits.swapaxes(2, 3)

    batch, heads, *_, rows = bits.shape
    by_block = bits.reshape(batch, heads, -1, width // WORD, rows // tile, tile)
    seen = jnp.any(by_block != 0, axis=(3, 5))
    if heads > 1:
        seen = jnp.any(seen.reshape(batch, -1, groups, *seen.shape[2:]), axis=2)
    blocks, tiles = (-(-shape[d - 2] // parts[d - 2]) for d in (columns, 5 - columns))
    seen = jnp.broadcast_to(seen, (*seen.shape[:2], blocks, tiles))
    block = lax.broadcasted_iota(jnp.int32, seen.shape, 2)
    first = jnp.min(jnp.where(seen, block, blocks), axis=2)
    end = jnp.max(jnp.where(seen, block + 1, 0), axis=2)
    return {"bits": bits, "spans": jnp.stack([first, end], axis=2)}
