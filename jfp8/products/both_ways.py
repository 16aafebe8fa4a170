"""A matrix, read once and quantized for both directions of contraction, by Pallas kernels.

A tensor takes part in two products, one of which sums over its rows and one over its columns.
Tensor cores want the contraction last in both, so one takes ``q`` and the other ``q^T``. XLA would
read the tensor for each, and again for its amax; a kernel writes them all from one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.job import HARDWARE_FORMATS
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import codes_to_format
from jfp8.scaling.formats import E8M0FNU
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import Block, amax, ragged_block, reciprocal, scale_from_amax
from jfp8.tracing.compat import kernels_are_interpreted, same_varying_axes
from jfp8.tracing.divided import divided


class BothWays(NamedTuple):
    """A matrix ``x[m, n]``, quantized.

    Attributes:
      straight: ``[m, n]``, for sums over n.
      transposed: ``[n, m]``, for sums over m.
      amax: f32[], of x.
    """

    straight: ScaledArray
    transposed: ScaledArray
    amax: jax.Array


def has_kernel(quantizer: Quantizer) -> bool:
    """Whether there is a kernel that does what `quantizer` does, bit for bit."""
    return (
        type(quantizer) in _KERNELS
        and quantizer.rounding == "nearest_even"
        and quantizer.fmt in HARDWARE_FORMATS
        and (quantizer.block is None or quantizer.block in _BLOCKS)
    )


# A kernel takes a while to compile, so it is compiled once for all layers of the same shapes.
@partial(jax.jit, static_argnums=0)
def quantize_both_ways(quantizer: Quantizer, x: jax.Array, state: AmaxState | None) -> BothWays:
    """`x` quantized by `quantizer`, which must have a kernel, for both directions.

    The kernels run where the program is compiled for CUDA. Elsewhere `x` is quantized in two steps,
    to the same bytes.
    """
    kernel = _KERNELS[type(quantizer)]

    def by_kernel(x, state):
        return same_varying_axes((kernel(quantizer, x, state), x))[0]

    def in_steps(x, state):
        largest = amax(x)
        straight = quantizer(x, Context((1,), largest, state))
        other = quantizer(x, Context((0,), largest, state))
        return BothWays(straight, other.T, largest)

    if kernels_are_interpreted():
        return by_kernel(x, state)
    return lax.platform_dependent(x, state, cuda=by_kernel, default=in_steps)


# One function for each kind of quantizer that has a kernel. Each gives what the quantizer gives,
# bit for bit.


def _unit(quantizer: Unit, x: jax.Array, state: AmaxState | None) -> BothWays:
    del state
    return _with_one_scale(quantizer, x, jnp.ones((), jnp.float32))


def _current(quantizer: Current, x: jax.Array, state: AmaxState | None) -> BothWays:
    del state
    largest = amax(x)
    scale = scale_from_amax(largest, quantizer.fmt, scale_rounding=quantizer.scale_rounding)
    return _with_one_scale(quantizer, x, scale, largest)


def _delayed(quantizer: Delayed, x: jax.Array, state: AmaxState | None) -> BothWays:
    from jfp8.matmul.hopper import quantize

    if state is None:
        largest = amax(x)
        return _with_one_scale(quantizer, x, quantizer.scale(largest, None), largest)
    # The current amax matters only while the history is empty, and is computed only then.
    amax_of = divided("tensor_amax", quantize.tensor_amax, "i j, -> ", combine="max")
    at_first = amax_of(x, quantizer.expected(state))
    return _with_one_scale(quantizer, x, quantizer.scale(at_first, state))


def _with_one_scale(
    quantizer: Quantizer, x: jax.Array, scale: jax.Array, largest: jax.Array | None = None
) -> BothWays:
    from jfp8.matmul.hopper import quantize

    inverse, with_amax = reciprocal(scale), largest is None
    both = divided(
        "quantize_both",
        partial(quantize.quantize_both, fmt=quantizer.fmt, with_amax=with_amax),
        "i j, , -> i j, j i, " if with_amax else "i j, , -> i j, j i",
        combine="max",
    )
    q, q_t, found = both(x, inverse, inverse)
    largest = found if largest is None else largest
    assert largest is not None
    return BothWays(ScaledArray(q, scale), ScaledArray(q_t, scale), largest)


def _rowwise(quantizer: Rowwise, x: jax.Array, state: AmaxState | None) -> BothWays:
    from jfp8.matmul.hopper import quantize

    del state
    maxima = divided(
        "row_and_column_amax", quantize.row_and_column_amax, "i j -> i, j", combine="max"
    )(x)
    rows, columns = (
        scale_from_amax(m, quantizer.fmt, scale_rounding=quantizer.scale_rounding) for m in maxima
    )
    both = divided(
        "quantize_both",
        partial(quantize.quantize_both, fmt=quantizer.fmt, with_amax=False),
        "i j, i, j -> i j, j i",
    )
    q, q_t, _ = both(x, reciprocal(rows), reciprocal(columns))
    straight, other = ScaledArray(q, rows[:, None]), ScaledArray(q_t, columns[:, None])
    return BothWays(straight, other, amax(maxima[0]))


def _blockwise(quantizer: Blockwise, x: jax.Array, state: AmaxState | None) -> BothWays:
    from jfp8.matmul.hopper import quantize_blocks

    del state
    along, across = quantizer.block_size
    m, n = x.shape
    fmt, rounding = quantizer.fmt, quantizer.scale_rounding
    if across > 1:
        tiles = partial(quantize_blocks.quantize_tiles, fmt=fmt, scale_rounding=rounding)
        q, q_t, scale = divided(
            f"quantize_tiles, {rounding}", tiles, f"i j -> i j, j i, i/{along} j/{along}"
        )(x)
        scales = scale, scale.T
    else:
        rows = partial(
            quantize_blocks.quantize_rows_in_blocks, fmt=fmt, block=along, scale_rounding=rounding
        )
        q, s, q_t, s_t = divided(
            f"quantize_rows_in_blocks_{along}, {rounding}",
            rows,
            f"i j -> i j, j/{along} i, j i, i/{along} j",
        )(x)
        scales = s.T, s_t.T
    if scales[0].dtype == jnp.uint8:
        scales = tuple(codes_to_format(s, E8M0FNU) for s in scales)
    blocks = (ragged_block(Block((across, along)), shape) for shape in ((m, n), (n, m)))
    straight, other = map(ScaledArray, (q, q_t), scales, blocks)
    return BothWays(straight, other, amax(x))


_BLOCKS = {(128, 1), (128, 128), (32, 1)}
_KERNELS: dict[type[Quantizer], Callable[..., BothWays]] = {
    Unit: _unit,
    Current: _current,
    Delayed: _delayed,
    Rowwise: _rowwise,
    Blockwise: _blockwise,
}
