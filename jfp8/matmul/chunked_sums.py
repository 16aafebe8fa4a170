"""Sums over the contraction in chunks, as in hardware, with scales applied between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul import tensor_core_sums
from jfp8.matmul.known_scales import scale_shape_of
from jfp8.matmul.spec import Numbers, free_dims, layout_of, plain_dot, scale_products, to_output
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.scaling.parts import expand_scale
from jfp8.tracing.compat import same_varying_axes


def dot_in_chunks(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: Numbers,
    accumulation: str,
    exact: Callable[..., jax.Array],
) -> jax.Array:
    """Compute ``sum_c scale_c * (sum_{k in c} lhs_k rhs_k)`` over chunks of the contraction.

    Inner sums are as in hardware, the outer one is in f32. A chunk has 128 terms where
    `accumulation` says so, and is never longer than the run over which the scales are constant:
    otherwise they could not be applied after its sum. (Sums in f32 apply them to the terms
    instead.) `exact` is the product of the data of two chunks with f32 sums.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_contract) != 1:
        lhs, rhs, dimension_numbers = _with_one_contraction(lhs, rhs, dimension_numbers)
        return dot_in_chunks(lhs, rhs, dimension_numbers, accumulation, exact)
    (lhs_axis,), (rhs_axis,) = lhs_contract, rhs_contract
    layout = layout_of(lhs.shape, rhs.shape, dimension_numbers)
    lhs_free, rhs_free = layout.lhs_free, layout.rhs_free
    total = same_varying_axes((jnp.zeros(layout.shape, jnp.float32), lhs.data, rhs.data))[0]
    k = lhs.shape[lhs_axis]
    if k == 0:
        return total
    runs = [r for r in (_run_length(lhs, lhs_axis), _run_length(rhs, rhs_axis)) if r]
    length = 128 if accumulation.endswith("every_128") else k
    scales_inside = False
    if accumulation.startswith("hopper"):
        chain = tensor_core_sums.dot_general
        if runs:
            length = math.gcd(*runs, *([length] if length == 128 else []))
    else:
        chain = exact
        scales_inside = any(run % length for run in runs)

    lhs_data, rhs_data = (
        _padded(scaled_values(q) if scales_inside else q.data, axis, length)
        for q, axis in ((lhs, lhs_axis), (rhs, rhs_axis))
    )

    def add(chunk, total):
        start = chunk * length
        lhs_part = lax.dynamic_slice_in_dim(lhs_data, start, length, lhs_axis)
        rhs_part = lax.dynamic_slice_in_dim(rhs_data, start, length, rhs_axis)
        if scales_inside:
            y = plain_dot(lhs_part, rhs_part, dimension_numbers, lax.Precision.HIGHEST)
            return total + y
        y = chain(lhs_part, rhs_part, dimension_numbers)
        for scale in scale_products(
            _scales_at(lhs, lhs_axis, start, lhs_batch, lhs_free, 0, len(rhs_free)),
            _scales_at(rhs, rhs_axis, start, rhs_batch, rhs_free, len(lhs_free), 0),
        ):
            y = y * scale
        return total + y

    return lax.fori_loop(0, -(-k // length), add, total)


def _with_one_contraction(
    lhs: ScaledArray, rhs: ScaledArray, dimension_numbers: Numbers
) -> tuple[ScaledArray, ScaledArray, Numbers]:
    """Return the same product with all contracted dimensions merged into one, the last."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = _merged_last(lhs, lhs_batch, lhs_contract)
    rhs = _merged_last(rhs, rhs_batch, rhs_contract)
    batch = tuple(range(len(lhs_batch)))
    return lhs, rhs, (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))


def _merged_last(q: ScaledArray, batch: Sequence[int], contract: Sequence[int]) -> ScaledArray:
    """Return `q` as (batch, free, contracted), merged, with a scale for each contracted element."""
    order = (*batch, *free_dims(q.ndim, contract, batch), *contract)
    kept = q.ndim - len(contract)

    def merged(x: jax.Array) -> jax.Array:
        x = x.transpose(order)
        return x.reshape(*x.shape[:kept], math.prod(x.shape[kept:]))

    shape = scale_shape_of(q)
    if not shape:
        return ScaledArray(merged(q.data), q.scale)
    scale = q.scale.data if isinstance(q.scale, ScaledArray) else jnp.asarray(q.scale)
    scale = expand_scale(scale, q.shape, q.block)
    full = [n if d in contract else scale.shape[d] for d, n in enumerate(q.shape)]
    scale = merged(jnp.broadcast_to(scale, full))
    run = math.prod(q.shape[d] for d in contract)
    if any(shape[d] != 1 for d in contract):
        # The length of a block along the last dimension, and a divisor of that dimension: runs
        # never cross rows.
        run = math.gcd(q.block_sizes()[contract[-1]], q.shape[contract[-1]])
    scale = lax.slice_in_dim(scale, 0, None, max(run, 1), axis=-1)
    if isinstance(q.scale, ScaledArray):
        outer = jnp.asarray(q.scale.scale)
        return ScaledArray(
            merged(q.data), ScaledArray(scale, merged(outer) if outer.ndim else outer)
        )
    return ScaledArray(merged(q.data), scale)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Return `x` padded with zeros along `axis` to a multiple of `length`."""
    missing = -x.shape[axis] % length
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)])


def _run_length(q: ScaledArray, axis: int) -> int | None:
    """Return the number of consecutive elements along `axis` per scale; None if all share one."""
    shape = scale_shape_of(q)
    return None if not shape or shape[axis] == 1 else q.block_sizes()[axis]


def _scales_at(
    q: ScaledArray,
    axis: int,
    start: jax.Array,
    batch: Sequence[int],
    free: Sequence[int],
    before: int,
    after: int,
) -> tuple[jax.Array, ...]:
    """The scales of the elements from `start` along the contracted `axis`; see `to_output`."""
    scales = []
    for scale in scale_as_f32_pair(q):
        if scale.ndim and scale.shape[axis] != 1:
            scale = lax.dynamic_slice_in_dim(scale, start // q.block_sizes()[axis], 1, axis)
        scales.append(to_output(scale, q, batch, free, before, after))
    return tuple(scales)
