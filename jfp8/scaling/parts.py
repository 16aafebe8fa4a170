"""The mapping of scales to elements of an array and of its parts, where blocks share them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.tracing.shardings import sharded_like

_Blocks = tuple[int, ...]


def rule_of_scales(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], block: _Blocks | None
) -> str:
    """Return the rule that scales of `scale_shape` break for data of `shape`; "" if they fit."""
    if not scale_shape:
        return ""
    if block is None:
        fits = len(scale_shape) == len(shape) and not any(
            n % m if m else n for m, n in zip(scale_shape, shape, strict=True)
        )
        rule = "the scale must be 0-d, or have as many dimensions as the data, each dividing the "
        rule += "data's"
    else:
        fits = len(block) == len(shape) and scale_shape == tuple(
            -(-n // b) for n, b in zip(shape, block, strict=True)
        )
        rule = "each dimension needs ceil(size / block) scales"
    return "" if fits else rule


def apply_scale(
    values: jax.Array, scale: jax.Array, block: tuple[int, ...] | None = None
) -> jax.Array:
    """Return ``values * scale`` with each scale element covering its block of `values`."""
    if scale.ndim == 0:
        return values * scale
    return sharded_like(values, partial(_apply_scale, block=block), values, scale)


def _apply_scale(
    values: jax.Array, scale: jax.Array, block: tuple[int, ...] | None = None
) -> jax.Array:
    if all(m in (1, n) for m, n in zip(scale.shape, values.shape, strict=True)):
        return values * scale
    if block is not None:
        return values * expand_scale(scale, values.shape, block)
    blocked, expanded = [], []
    for n, m in zip(values.shape, scale.shape, strict=True):
        blocked += [m, n // max(m, 1)]
        expanded += [m, 1]
    return (values.reshape(blocked) * scale.reshape(expanded)).reshape(values.shape)


def split_e8m0(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``2^a, 2^b``, both normal, with ``2^(c-127) = 2^a * 2^b``; NaN for code 255."""
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    half = code >> 1  # c - 127 = (half - 63) + (code - half - 64)
    first = lax.bitcast_convert_type((half + np.uint32(64)) << 23, jnp.float32)
    second = lax.bitcast_convert_type((code - half + np.uint32(63)) << 23, jnp.float32)
    # XLA:CPU multiplies constant factors with each other first; the barrier prevents that.
    return lax.optimization_barrier((jnp.where(code == 255, jnp.nan, first), second))


def expand_scale(
    scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...] | None
) -> jax.Array:
    """Return a scale of ``len(shape)`` dimensions, with blocks of several elements spelled out.

    Dimensions over which it does not vary keep the size 1.
    """
    for axis, n in enumerate(shape):
        m = scale.shape[axis]
        if m not in (1, n):
            b = n // m if block is None else block[axis]
            scale = lax.slice_in_dim(jnp.repeat(scale, b, axis=axis), 0, n, axis=axis)
    return scale


def index_of_scales(
    index: Any, shape: tuple[int, ...], scale_shape: tuple[int, ...], block: _Blocks | None
) -> tuple[tuple[Any, ...], _Blocks | None]:
    """Return the index into the scales that belongs to `index` into the data.

    A slice must begin and end where blocks do, or stay within one block. An integer (or 0-d integer
    array) takes the scale of its block with it. The second result is the `block` of the part.
    """
    at, sizes = [], []
    items = _one_for_each(index, len(shape))
    for axis, (item, n, m) in enumerate(zip(items, shape, scale_shape, strict=True)):
        b = max(1, n // max(m, 1) if block is None else block[axis])
        if isinstance(item, slice):
            at.append(_scales_of_slice(item, axis, n, m, b))
            sizes.append(b)
        else:
            at.append(_scale_of_element(item, axis, n, b))
    return tuple(at), None if block is None or not sizes else tuple(sizes)


def _one_for_each(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return `index` as a tuple with an entry for each dimension."""
    items = index if isinstance(index, tuple) else (index,)
    dots = [i for i, item in enumerate(items) if item is Ellipsis] or [len(items)]
    given = (*items[: dots[0]], *items[dots[0] + 1 :])
    if len(given) > ndim or len(dots) > 1:
        raise IndexError(f"Too many indices for an array of {ndim} dimensions: {index}.")
    whole = (slice(None),) * (ndim - len(given))
    return (*given[: dots[0]], *whole, *given[dots[0] :])


def _scale_of_element(i: Any, axis: int, n: int, b: int) -> Any:
    if isinstance(i, int | np.integer) and not isinstance(i, bool):
        if not -n <= i < n:
            raise IndexError(f"Index {i} is out of bounds for axis {axis} of size {n}.")
        return int(i) % n // b
    is_array = isinstance(i, jax.Array | np.ndarray)
    if not is_array or i.ndim or not jnp.issubdtype(i.dtype, jnp.integer):
        raise TypeError(
            "A ScaledArray with several scales is indexed by integers and slices, not by "
            f"{type(i).__name__}. Index its values: q.dequantize()[...]."
        )
    i = jnp.asarray(i, jnp.int32)
    return jnp.where(i < 0, i + n, i) // b


def _scales_of_slice(part: slice, axis: int, n: int, m: int, b: int) -> slice:
    if b == 1 and m == n:
        return part
    elements = range(*part.indices(n))
    if not elements:
        return slice(0, 0)
    first, last = min(elements) // b, max(elements) // b
    ends = elements.stop % b == 0 or elements.stop == n
    if first != last and (elements.step != 1 or elements.start % b or not ends):
        spelled = ":".join("" if i is None else str(i) for i in (part.start, part.stop, part.step))
        raise TypeError(
            f"q[{spelled}] on axis {axis} cuts blocks of {b} elements, which share a scale. Take "
            "whole blocks, or a part of the values: q.dequantize()[...]."
        )
    return slice(first, last + 1)
