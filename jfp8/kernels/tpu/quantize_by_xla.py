"""Casts of a matrix by XLA, which can shard it over TPUs, in forms that its compiler fuses.

Other forms give the same results, but move up to ten times the bytes: blocks along rows
cross the tiles of 8x128 elements in which a TPU stores a matrix, and an amax of integers is
computed in a separate read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jfp8.kernels.tpu.tiles import LANES
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import convert, magnitude_bits
from jfp8.scaling.formats import Format
from jfp8.scaling.quantization import reciprocal_of_block_scale
from jfp8.scaling.scales import ScaleRounding, scale_from_amax

_SUBLANES = 8  # rows of a tile


def cast(x: jax.Array, inverse: jax.Array, fmt: Format) -> jax.Array:
    """Return ``cast(x * inverse)``; finite values saturate, others become NaN."""
    wide = x.astype(jnp.float32)
    return convert((wide + wide * np.float32(0)) * inverse, fmt)  # a mask would be written


def amax(x: jax.Array, axes: tuple[int, ...] = (0, 1)) -> jax.Array:
    """Return ``max(|x|)`` over `axes`, f32, with kept dimensions; NaN if any element is NaN.

    The compiler computes a maximum of floats in the read in which it casts `x`, not of integers.
    The bits of a bf16 number without its sign order as its magnitude does, NaN last, and as numbers
    they are exact in f32.
    """
    bits = magnitude_bits(x)
    if bits.dtype != jnp.uint16:
        return lax.bitcast_convert_type(jnp.max(bits, axes, keepdims=True), x.dtype)
    largest = jnp.max(bits.astype(jnp.float32), axes, keepdims=True).astype(bits.dtype)
    return lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def values_in_blocks(
    x: jax.Array, fmt: Format, block: int, scale_rounding: ScaleRounding
) -> tuple[jax.Array, jax.Array]:
    """Return the values of `x` in bf16, by blocks of ``1 x block``, and by blocks of ``block x 1``.

    If the scales are powers of two the values are exact, and sufficient for a matmul in bf16, which
    would have to combine codes and scales first.

    `block` is 128 or 32, and sizes of `x` are multiples of 128.
    """
    in_columns = _values_in_columns(x, fmt, block, scale_rounding)
    if block != LANES:  # slices of the rows of a tile, through one transposed copy
        turned = lax.optimization_barrier(x.T)
        return _values_in_columns(turned, fmt, block, scale_rounding).T, in_columns
    m, n = x.shape
    by_tile = (m // _SUBLANES, _SUBLANES, n // LANES, LANES)
    tiles = x.reshape(by_tile).transpose(0, 2, 1, 3)  # in storage order
    in_rows = _rounded(tiles, amax(tiles, (3,)), fmt, scale_rounding)
    return _stored(in_rows.transpose(0, 2, 1, 3).reshape(x.shape)), in_columns


def values_in_tiles(
    x: jax.Array, fmt: Format, block: int, scale_rounding: ScaleRounding
) -> jax.Array:
    """Return the values of `x` in blocks of ``block x block``; see `values_in_blocks`."""
    m, n = x.shape
    rows = x.reshape(m // block, block, n)
    by_column = amax(rows, (1,)).reshape(m // block, n // block, block)
    largest = jnp.repeat(amax(by_column, (2,)), block, axis=2).reshape(m // block, 1, n)
    return _stored(_rounded(rows, largest, fmt, scale_rounding).reshape(x.shape))


def _values_in_columns(
    x: jax.Array, fmt: Format, block: int, scale_rounding: ScaleRounding
) -> jax.Array:
    blocks = x.reshape(-1, block, x.shape[1])
    return _stored(_rounded(blocks, amax(blocks, (1,)), fmt, scale_rounding).reshape(x.shape))


def _rounded(
    x: jax.Array, largest: jax.Array, fmt: Format, scale_rounding: ScaleRounding
) -> jax.Array:
    scale = scale_from_amax(largest, fmt, scale_rounding=scale_rounding, poison=True)
    data = convert(x.astype(jnp.float32) * reciprocal_of_block_scale(scale), fmt)
    return scaled_values(ScaledArray(data, scale)).astype(jnp.bfloat16)


def _stored(x: jax.Array) -> jax.Array:
    """Return a matrix, written to memory row by row.

    Otherwise the compiler moves the matmul's order of dimensions before the cast, in copies of
    f32; and it computes both directions in one read only if they have the same order.
    """
    rows_first = with_layout_constraint(lax.optimization_barrier(x), Layout((0, 1)))
    return lax.optimization_barrier(rows_first)
