"""Positions of queries and keys for attention: rotated features, or a bias of the scores."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.layers.options import check_option
from jfp8.products.flash.mask import window_of

GroupMethod = Literal["consecutive", "alternate"]
Rotary = tuple[tuple[float, float], GroupMethod]  # the options of `rotary_embedding`


def position_mask(
    sizes: tuple[int, int],
    window: int | tuple[int, int] | None = None,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Return ``bool[queries, keys]``: queries at `first` and behind it see these keys, no later."""
    i, j = first + jnp.arange(sizes[0])[:, None], jnp.arange(sizes[1])[None]
    seen, bounds = j <= i, window_of(window)
    return seen if bounds is None else seen & (j >= i - bounds[0]) & (j <= i + bounds[1])


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    windows: tuple[float, float] = (1, 10_000),
    group_method: GroupMethod = "consecutive",
) -> jax.Array:
    """Rotary position embedding: pairs of features rotate by an angle that grows with the position.

    Pair ``i`` of ``depth / 2`` rotates by ``position / (lo * (hi / lo)^(2 i / depth))``, where
    ``lo, hi`` are the `windows`. The product of a query and a key then depends only on the distance
    between them.

    Args:
      x: ``[..., length, heads, depth]``, with an even depth.
      positions: ``[length]``, or with leading dimensions of `x`; default: 0, 1, 2 ...
      windows: shortest and longest wavelength, in units of ``2 pi`` positions.
      group_method: the features that are pairs: ``"consecutive"`` ones, ``(2 i, 2 i + 1)``, or
        ``"alternate"``, ``(i, i + depth / 2)``, for which Llama's and GPT-NeoX's weights are.

    References:
      arXiv 2104.09864, which pairs consecutive features.
    """
    check_option("group_method", group_method, ("consecutive", "alternate"))
    length, _, depth = x.shape[-3:]
    if depth % 2:
        raise ValueError(
            f"Rotary embedding rotates pairs of features, but their number is odd: {depth}."
        )
    shortest, longest = windows
    wavelengths = shortest * (longest / shortest) ** (np.arange(0, depth, 2) / depth)
    if positions is None:
        positions = jnp.arange(length)
    leading = (1,) * (x.ndim - 2 - positions.ndim)
    positions = positions.reshape(*leading, *positions.shape, 1, 1)
    angles = positions / wavelengths.astype(np.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    sin, cos = jnp.sin(angles), jnp.cos(angles)

    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if group_method == "consecutive":
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


def relative_position_buckets(
    distances: np.ndarray,
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> np.ndarray:
    """Return T5's bucket of each distance: position of the key minus position of the query.

    Half of the buckets are for exact distances, the others for ranges that grow in proportion up to
    `max_distance`; the last one is for everything beyond. If `bidirectional`, half of all buckets
    are for keys before the query, half for keys after it; otherwise keys after it share bucket 0.

    References:
      arXiv 1910.10683; ``_relative_position_bucket`` of Mesh TensorFlow and T5X.
    """
    backwards, first = -np.asarray(distances), np.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        first = np.where(backwards < 0, num_buckets, 0)
        backwards = np.abs(backwards)
    backwards = np.maximum(backwards, 0)
    exact = num_buckets // 2
    # The published rule's epsilon: a distance on the border belongs to the farther bucket.
    ratio = np.maximum(backwards, 1) / exact + np.finfo(np.float32).eps
    steps = np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)
    ranged = np.minimum(exact + steps.astype(np.int64), num_buckets - 1)
    return first + np.where(backwards < exact, backwards, ranged)


def relative_position_bias(
    table: jax.Array,
    query_length: int,
    key_length: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    position: jax.Array | None = None,
) -> jax.Array:
    """Return ``[heads, query_length, key_length]``: what `table` has for each distance.

    Args:
      table: ``[heads, num_buckets]``; see `relative_position_buckets`.
      position: int32[], of the first query, for decoding: all queries are before `key_length`.
        None: 0.
    """
    # There are far fewer distances than pairs: look up the former once.
    longest = query_length if position is None else key_length
    distances = np.arange(1 - longest, key_length)
    buckets = relative_position_buckets(
        distances,
        bidirectional=bidirectional,
        num_buckets=table.shape[-1],
        max_distance=max_distance,
    )
    by_distance = table[:, buckets]
    queries = jnp.arange(query_length) if position is None else position + jnp.arange(query_length)
    pairs = jnp.arange(key_length)[None, :] - queries[:, None]
    return by_distance[:, pairs + (longest - 1)]
