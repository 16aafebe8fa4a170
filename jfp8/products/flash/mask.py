"""Masks: the keys that a query may attend to, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.scaling.codes import as_float_array

BLOCK = 64, 128  # queries, and keys, of a block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visible:
    """The keys that a query may attend to, and the bias of its scores.

    Attributes:
      sizes: numbers of queries and of keys.
      is_causal: query ``i`` sees no key after ``i``.
      window: how many keys before and after ``i`` query ``i`` sees; None: all.
      lengths: numbers of queries and of keys of each sequence, int32[batch], or None.
      mask: bool[batch | 1, heads | 1, groups | 1, queries | 1, keys | 1], or None.
      bias: floating, of such a shape, or None.
      segments: those of queries, int[batch, 1, 1, queries, 1], and of keys, int[batch, 1, 1, 1,
        keys]: a query sees no key of another segment. None: there is one segment.
      sinks: f32[1, heads, groups, 1], a logit more in the softmax's denominator, or None.
    """

    sizes: tuple[int, int] = field(metadata={"static": True})
    is_causal: bool = field(metadata={"static": True})
    window: tuple[int, int] | None = field(metadata={"static": True})
    lengths: tuple[jax.Array | None, jax.Array | None] = (None, None)
    mask: jax.Array | None = None
    bias: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None
    sinks: jax.Array | None = None

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        queries, keys = map(min, BLOCK, self.sizes)
        return queries, keys

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of blocks of queries, and of keys."""
        queries, keys = (-(-n // b) for n, b in zip(self.sizes, self.block, strict=True))
        return queries, keys

    def keys_of(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first block of keys that block `i` of queries sees some of, and the end of them."""
        (of_queries, of_keys), (_, end) = self.block, self.blocks
        first, last = jnp.int32(0), jnp.int32(end)
        if self.window is not None:
            first = jnp.maximum(i * of_queries - self.window[0], 0) // of_keys
            last = jnp.minimum(last, ((i + 1) * of_queries - 1 + self.window[1]) // of_keys + 1)
        if self.is_causal:
            last = jnp.minimum(last, ((i + 1) * of_queries - 1) // of_keys + 1)
        return jnp.minimum(first, last), jnp.maximum(last, 0)

    @property
    def may_hide_all_keys(self) -> bool:
        """Return True if a query may see no key."""
        given = self.mask, self.segments, *self.lengths
        beyond = self.window is not None and self.sizes[0] > self.sizes[1]
        return beyond or any(x is not None for x in given)

    def whole(self) -> jax.Array:
        """bool[batch | 1, heads | 1, groups | 1, queries, keys]: queries see these keys."""
        rows, columns = (jnp.arange(n) for n in self.sizes)
        return self._seen(rows, columns, lambda x, fill: x)

    def of_block(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Return block ``(i, j)`` of `whole`."""
        of_queries, of_keys = self.block
        rows, columns = i * of_queries + jnp.arange(of_queries), j * of_keys + jnp.arange(of_keys)
        return self._seen(rows, columns, lambda x, fill: self.part(x, i, j, fill))

    def _seen(
        self, rows: jax.Array, columns: jax.Array, part: Callable[[jax.Array, Any], jax.Array]
    ) -> jax.Array:
        """Return whether queries see keys, at these positions; `part` has a mask's part there."""
        row, column = rows[None, None, None, :, None], columns[None, None, None, None, :]
        seen = (row < self.sizes[0]) & (column < self.sizes[1])
        if self.is_causal:
            seen &= column <= row
        if self.window is not None:
            seen &= (column >= row - self.window[0]) & (column <= row + self.window[1])
        for length, at in zip(self.lengths, (row, column), strict=True):
            if length is not None:
                seen = seen & (at < length[:, None, None, None, None])
        if self.segments is not None:
            of_query, of_key = (part(x, 0) for x in self.segments)
            seen = seen & (of_query == of_key)
        return seen if self.mask is None else seen & part(self.mask, False)

    def part(self, x: jax.Array, i: jax.Array, j: jax.Array, fill: Any) -> jax.Array:
        """Block ``(i, j)`` of a mask or bias; `fill` beyond its end."""
        for axis, at, block, n in zip((3, 4), (i, j), self.block, self.blocks, strict=True):
            if x.shape[axis] > 1:
                x = lax.dynamic_slice_in_dim(
                    padded(x, axis, n * block, fill), at * block, block, axis
                )
        return x

    def padded_bias(self) -> tuple[int, ...]:
        """Return the shape of the bias, with whole blocks of queries and keys."""
        assert self.bias is not None
        sizes = (n * block for n, block in zip(self.blocks, self.block, strict=True))
        of_blocks = (
            1 if old == 1 else n for old, n in zip(self.bias.shape[3:], sizes, strict=True)
        )
        return (*self.bias.shape[:3], *of_blocks)


def padded(x: jax.Array, axis: int, size: int, fill: Any = 0) -> jax.Array:
    """Return `x` with `fill` behind it along `axis`, up to `size`."""
    if x.shape[axis] == size:
        return x
    width = [(0, size - x.shape[d] if d == axis else 0) for d in range(x.ndim)]
    return jnp.pad(x, width, constant_values=fill)


def window_of(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return ``local_window_size`` before and after a query, or None for all keys."""
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    if left < 0 or right < 0:
        raise ValueError(
            f"local_window_size={size!r}: keys that a query sees before and after its own "
            "position, which cannot be negative. None: it sees all."
        )
    return left, right


def integers_of(
    x: jax.typing.ArrayLike | None, name: str, shape: tuple[int, ...]
) -> jax.Array | None:
    """Return what users give for sequences or tokens, int[shape]; `name` is for the message."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        each = "sequence" if len(shape) == 1 else "token"
        raise ValueError(
            f"{name} must be integers of shape {shape}, one for each {each}; got {x.dtype} of "
            f"shape {x.shape}."
        )
    return x


def segments_of(
    query: Any, key: Any, batch: int, sizes: tuple[int, int]
) -> tuple[jax.Array, jax.Array] | None:
    """Return the segment ids that users give, as in `Visible`."""
    names = "query_segment_ids", "key_value_segment_ids"
    given = zip((query, key), names, sizes, strict=True)
    ids = [integers_of(x, name, (batch, size)) for x, name, size in given]
    if (ids[0] is None) != (ids[1] is None):
        raise ValueError(
            f"{names[0]} and {names[1]} are compared with each other, but only one was given. Give "
            "both; in self attention they are the same array."
        )
    if ids[0] is None or ids[1] is None:
        return None
    return ids[0][:, None, None, :, None], ids[1][:, None, None, None, :]


def by_score(
    x: jax.typing.ArrayLike | None, name: str, shape: tuple[int, ...], kv_heads: int
) -> jax.Array | None:
    """Return a mask or bias as ``[batch | 1, heads | 1, groups | 1, queries | 1, keys | 1]``."""
    if x is None:
        return None
    x = jnp.asarray(x)
    wanted = jnp.bool_ if name == "mask" else jnp.floating
    if not jnp.issubdtype(x.dtype, wanted):
        raise TypeError(
            f"{name} must be {'bool' if name == 'mask' else 'floating'}, got {x.dtype}. "
            "A mask hides keys where it is False; a bias is added to the scores."
        )
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if x.ndim != 4 or any(n not in (1, whole) for n, whole in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to [B, N, T, S] = {shape}.")
    heads = (kv_heads, shape[1] // kv_heads) if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def by_head(sinks: Any, heads: int, kv_heads: int) -> jax.Array | None:
    """Return the sinks that users give, as in `Visible`."""
    if sinks is None:
        return None
    sinks = as_float_array(sinks, "sinks")
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks must have the shape {(heads,)}, one for each head; got {sinks.shape}."
        )
    return sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
