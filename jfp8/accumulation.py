"""Sums over a contraction as hardware forms them: in chunks, with the scales between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.arrays import ScaledArray, expand_scale, scale_as_f32_pair, scaled_values
from jfp8.compat import same_varying_axes
from jfp8.kernels import emulate, hopper

ACCUMULATIONS = ("f32", "f32_every_128", "hopper", "hopper_every_128")


def dot_in_chunks(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    accumulation: str,
) -> jax.Array:
    """``y = sum_c scale_c * (sum_{k in c} lhs_k rhs_k)``, over chunks ``c`` of the contraction.

    The inner sums are those of the hardware, the outer one is in f32. A chunk is 128 long where
    `accumulation` says so, and no longer than the scales are constant: they cannot be taken out of
    its sum otherwise. (Sums in f32 take them in instead.)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = free_dims(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs.ndim, rhs_contract, rhs_batch)
    k = math.prod(lhs.shape[d] for d in lhs_contract)
    runs = [r for r in (_run_length(lhs, lhs_contract), _run_length(rhs, rhs_contract)) if r]
    length = 128 if accumulation.endswith("every_128") else max(k, 1)
    scales_inside = False
    if accumulation.startswith("hopper"):
        chain = hopper.dot_general
        if runs:
            length = math.gcd(*runs, *([length] if length == 128 else []))
    else:
        chain = emulate.dot_general
        scales_inside = any(run % length for run in runs)

    def laid_out(x: jax.Array, order: tuple[int, ...], sizes: tuple[int, int, int]) -> jax.Array:
        return x.transpose(order).reshape(sizes)

    def chunked(q: ScaledArray, order: tuple[int, ...], sizes: tuple[int, int, int], axis: int):
        """Data and scale as (chunks, batch, ...); the scale has size 1 along the contraction."""
        data = scaled_values(q) if scales_inside else q.data
        data = _split_axis(laid_out(data, order, sizes), axis, length)
        if scales_inside:
            return data, ()
        scales = []
        for scale in scale_as_f32_pair(q):
            if scale.ndim:
                scale = jnp.broadcast_to(expand_scale(scale, q.shape, q.block), q.shape)
                scale = laid_out(scale, order, sizes)
                scale = jnp.moveaxis(lax.slice_in_dim(scale, 0, None, length, axis), axis, 0)
                scale = jnp.expand_dims(scale, axis + 1)
            else:
                scale = jnp.broadcast_to(scale, (data.shape[0], 1, 1, 1))
            scales.append(scale)
        return data, tuple(scales)

    batch = tuple(lhs.shape[d] for d in lhs_batch)
    b, m = math.prod(batch), math.prod(lhs.shape[d] for d in lhs_free)
    n = math.prod(rhs.shape[d] for d in rhs_free)
    lhs_chunks = chunked(lhs, (*lhs_batch, *lhs_free, *lhs_contract), (b, m, k), 2)
    rhs_chunks = chunked(rhs, (*rhs_batch, *rhs_contract, *rhs_free), (b, k, n), 1)

    def add(total, chunk):
        (lhs_data, lhs_scales), (rhs_data, rhs_scales) = chunk
        numbers = (((2,), (1,)), ((0,), (0,)))
        if scales_inside:
            partial_sum = multiply(lhs_data, rhs_data, numbers, lax.Precision.HIGHEST)
        else:
            partial_sum = chain(lhs_data, rhs_data, numbers, fast_accumulation=True)
        for scale in scale_products(lhs_scales, rhs_scales):
            partial_sum = partial_sum * scale
        return total + partial_sum, None

    total = same_varying_axes((jnp.zeros((b, m, n), jnp.float32), lhs.data, rhs.data))[0]
    total, _ = lax.scan(add, total, (lhs_chunks, rhs_chunks))
    shape = (*batch, *(lhs.shape[d] for d in lhs_free), *(rhs.shape[d] for d in rhs_free))
    return total.reshape(shape)


def _split_axis(x: jax.Array, axis: int, length: int) -> jax.Array:
    """`axis` cut into chunks of `length`, zeros behind it, their number as a new first axis."""
    padding = [(0, -n % length if d == axis else 0) for d, n in enumerate(x.shape)]
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    chunks = x.shape[axis] // length
    x = x.reshape(*x.shape[:axis], chunks, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _run_length(q: ScaledArray, contract: Sequence[int]) -> int | None:
    """Over how many consecutive elements of the contraction the scale is constant; None: all."""
    shape = scale_shape_of(q)
    if not shape or all(shape[d] == 1 for d in contract):
        return None
    last = contract[-1]
    block = q.block[last] if q.block is not None else q.shape[last] // max(shape[last], 1)
    return block if len(contract) == 1 else math.gcd(block, q.shape[last])


def scale_products(
    lhs_scales: tuple[jax.Array, ...], rhs_scales: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Factors for the product of both operands; E8M0 scales come as pairs, others alone."""
    pairs = itertools.zip_longest(lhs_scales, rhs_scales)
    return [b if a is None else a if b is None else a * b for a, b in pairs]


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """A product of plain arrays with f32 sums."""
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=jnp.float32
    )


def free_dims(ndim: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that are neither contracted nor batch dimensions."""
    return tuple(d for d in range(ndim) if d not in contract and d not in batch)


def scale_shape_of(q: ScaledArray) -> tuple[int, ...]:
    """The shape of the scale of `q`, two-level or not."""
    return jnp.shape(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale)
