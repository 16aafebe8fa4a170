"""The keys and values of earlier tokens, for decoding step by step: functions, no framework."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.layers.position_math import position_mask
from jfp8.scaling.arrays import ScaledArray, dequantize
from jfp8.scaling.formats import E3M4, E4M3FN, E5M2, Format, FormatLike, as_format
from jfp8.scaling.granularity import PerAxis
from jfp8.scaling.quantization import quantize
from jfp8.tracing.shardings import sharded_like

Stored = ScaledArray | jax.Array


class KVCache(NamedTuple):
    """Keys and values of the first `index` positions; what is behind them is never attended to.

    In FP8 each token has its own scale in each head, ``f32[..., max_length, heads, 1]``. It is
    quantized once, when it is written, so that nothing stored changes later, and no token depends
    on another one.

    Attributes:
      key, value: ``[..., max_length, heads, depth]``.
      index: int32[], the position of the next token.
    """

    key: Stored
    value: Stored
    index: jax.Array

    @property
    def max_length(self) -> int:
        """The number of positions that there is room for."""
        return self.key.shape[-3]


# The names of Flax's variables, in the order of the fields.
NAMES = ("cached_key", "cached_value", "cache_index")


def init_kv_cache(shape: tuple[int, ...], dtype: Any) -> KVCache:
    """Return an empty cache.

    Args:
      shape: ``(..., max_length, heads, depth)``.
      dtype: see `dtype_or_format`.
    """
    known = dtype_or_format(dtype)

    def empty() -> Stored:
        if not isinstance(known, Format):
            return jnp.zeros(shape, known)
        return ScaledArray(jnp.zeros(shape, known.dtype), jnp.ones((*shape[:-1], 1), jnp.float32))

    return KVCache(empty(), empty(), jnp.zeros((), jnp.int32))


def dtype_or_format(given: FormatLike) -> np.dtype | Format:
    """Return a floating dtype of at least 16 bits, or an FP8 format; or raise for another one."""
    try:
        dtype = jnp.dtype(given)  # pyrefly: ignore
    except TypeError:
        dtype = None
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1:
        return dtype
    try:
        return as_format(given, "cache_dtype", (E4M3FN, E5M2, E3M4))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} Or a wide dtype such as jnp.bfloat16.") from None


def extended(cache: KVCache, key: jax.Array, value: jax.Array) -> KVCache:
    """Return `cache` with the keys and values ``[..., n, heads, depth]`` of the next positions."""
    shape, room = key.shape, cache.max_length
    if shape[:-3] != cache.key.shape[:-3] or shape[-2:] != cache.key.shape[-2:]:
        raise ValueError(
            f"Keys of shape {shape} do not fit a cache of shape {cache.key.shape}. Only the number "
            "of positions, the third dimension from the end, may differ: make the cache with the "
            "batch size that is decoded."
        )
    if shape[-3] > room:
        raise ValueError(
            f"{shape[-3]} positions were given, but the cache has room for {room}. Make it with "
            "the length of the whole sequence."
        )
    n = np.int32(shape[-3])
    return KVCache(
        _written(cache.key, key, cache.index),
        _written(cache.value, value, cache.index),
        cache.index + n,
    )


def _written(stored: Stored, x: jax.Array, index: jax.Array) -> Stored:
    put_at = partial(lax.dynamic_update_slice_in_dim, axis=x.ndim - 3)
    put = lambda old, new: sharded_like(old, put_at, old, new, index)  # it keeps its sharding
    if not isinstance(stored, ScaledArray):
        return put(stored, x.astype(stored.dtype))
    by_token_and_head = PerAxis(tuple(range(x.ndim - 1)))
    q = quantize(x, stored.format, granularity=by_token_and_head)
    return ScaledArray(put(stored.data, q.data), put(stored.scale, q.scale))


def keys_and_values(cache: KVCache, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return all keys and values, in `dtype`; zeros for positions that have none yet."""
    read = lambda x: dequantize(x, dtype) if isinstance(x, ScaledArray) else x.astype(dtype)
    return read(cache.key), read(cache.value)


def with_earlier(
    cache: KVCache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    window: int | tuple[int, int] | None = None,
) -> tuple[KVCache, tuple[jax.Array, ...], jax.Array]:
    """Return the new cache; queries, and keys and values up to here; and which of these they see.

    Queries are NaN if more positions were written than `cache` has room for: a compiled program
    cannot raise, and the positions that were written over would go unnoticed.

    Args:
      query, key, value: ``[..., n, heads, depth]``, of the next positions.
      mask: bool or numbers, broadcast to ``[..., heads, n, max_length]``: applies as well.
      window: see ``local_window_size`` of ``jax.nn.dot_product_attention``.
    """
    length = query.shape[-3]
    if length != key.shape[-3]:
        raise ValueError(
            f"decode=True is for self attention, but there are {length} queries and "
            f"{key.shape[-3]} keys. Use a layer without decode=True to attend to other inputs."
        )
    seen = position_mask((length, cache.max_length), window, cache.index)
    seen = seen.reshape((1,) * (query.ndim - 2) + seen.shape)
    cache = extended(cache, key, value)
    query = jnp.where(cache.index <= cache.max_length, query, jnp.nan).astype(query.dtype)
    seen = seen if mask is None else seen & jnp.asarray(mask, bool)  # Flax makes some of floats
    return cache, (query, *keys_and_values(cache, value.dtype)), seen
