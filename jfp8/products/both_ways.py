"""A matrix, read once and quantized for both directions of contraction, by Pallas kernels.

A tensor takes part in two products, one of which sums over its rows and one over its columns.
Tensor cores want the contraction last in both, so one takes ``q`` and the other ``q^T``. XLA would
read the tensor for each, and again for its amax; a kernel writes them all from one tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
      amax: f32[] of x, or f32[n] of n parts of x: then the largest is that of x.
    """

    straight: ScaledArray
    transposed: ScaledArray
    amax: jax.Array


def has_kernel(quantizer: Quantizer) -> bool:
    """Whether there is a kernel that does what `quantizer` does, bit for bit."""
    if quantizer.block is None:
        fits = getattr(quantizer, "scale_rounding", None) in _ROUNDINGS
    else:
        fits = quantizer.block in _BLOCKS
    return (
        type(quantizer) in _KERNELS
        and quantizer.rounding == "nearest_even"
        and quantizer.fmt in HARDWARE_FORMATS
        and fits
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
        from jfp8.matmul.hopper.sweep import parts

        largest = amax(x)
        straight = quantizer(x, Context((1,), largest, state))
        other = quantizer(x, Context((0,), largest, state))
        # As the kernel gives it.
        shape = (parts(),) if _finds_amax(quantizer, state) else ()
        return BothWays(straight, other.T, jnp.broadcast_to(largest, shape))

    if kernels_are_interpreted():
        return by_kernel(x, state)
    return lax.platform_dependent(x, state, cuda=by_kernel, default=in_steps)


# One function for each kind of quantizer that has a kernel. Each gives what the quantizer gives,
# bit for bit.


def _unit(quantizer: Unit, x: jax.Array, state: AmaxState | None) -> BothWays:
    del state
    ones = lambda: (jnp.ones((128,), jnp.float32),) * 2
    q, q_t, amaxes = _with_one_scale(quantizer, x, {}, ones)
    one = jnp.ones((), jnp.float32)  # by a constant XLA multiplies nothing
    return BothWays(replace(q, scale=one), replace(q_t, scale=one), amaxes)


def _current(quantizer: Current, x: jax.Array, state: AmaxState | None) -> BothWays:
    del state
    return _from_amax(quantizer, x, margin=0)


def _from_amax(quantizer: Current | Delayed, x: jax.Array, margin: int) -> BothWays:
    """By a scale from the amax of `x`, which XLA takes: it can do so where it makes `x`."""
    largest = amax(x)
    scale_of = lambda known: _scale(quantizer, jnp.full((128,), known[0]), margin)
    return _with_one_scale(quantizer, x, {"ONE": largest.reshape(1)}, scale_of, largest)


def _delayed(quantizer: Delayed, x: jax.Array, state: AmaxState | None) -> BothWays:
    from jfp8.matmul.hopper import quantize
    from jfp8.matmul.hopper.sweep import largest_of

    if state is None:
        return _from_amax(quantizer, x, quantizer.margin)
    history, in_step = state["amax_history"], state["amax"].reshape(1)
    if quantizer.algo == "max" and history.size > _LONG:
        history = quantizer.expected(state).reshape(1)
    read = history.size if quantizer.algo == "max" else 1

    def expected(history: Any) -> jax.Array:
        return functools.reduce(jnp.maximum, [history[i] for i in range(read)])

    # The current amax matters only while the history is empty, and is computed only then.
    find = partial(quantize.tensor_amax, unless=lambda history: expected(history) > 0)
    found = divided(f"tensor_amax, {quantizer}", find, "i j, STEP -> PART", "max")(x, history)

    def scale_of(history: Any, in_step: Any, found: Any) -> tuple[jax.Array, jax.Array]:
        predicted = jnp.full((128,), expected(history))
        observed = jnp.where(predicted > 0, predicted, largest_of(found))
        return _scale(quantizer, jnp.maximum(observed, in_step[0]), quantizer.margin)

    known = {"STEP": history, "ONE": in_step, "PART": found}
    return _with_one_scale(quantizer, x, known, scale_of)


def _scale(
    quantizer: Current | Delayed, amax: jax.Array, margin: int
) -> tuple[jax.Array, jax.Array]:
    """The scale and its reciprocal, inside of a kernel."""
    from jfp8.matmul.hopper.scales import scale_and_inverse

    rounding = quantizer.scale_rounding
    return scale_and_inverse(amax, quantizer.fmt, rounding, margin=margin, poison=False)


def _with_one_scale(
    quantizer: Quantizer,
    x: jax.Array,
    known: Mapping[str, jax.Array],
    scale_of: Callable[..., tuple[jax.Array, jax.Array]],
    largest: jax.Array | None = None,
) -> BothWays:
    """By ``scale_of(*known)``, which is made inside of the kernel.

    Args:
      known: vectors, by the names of their dimensions.
      largest: the amax of `x`; None: the kernel takes those of its parts.
    """
    from jfp8.matmul.hopper import quantize

    kernel = partial(
        quantize.quantize_tensor, fmt=quantizer.fmt, scale_of=scale_of, with_amax=largest is None
    )
    results, combine = "i j, j i, ONE", ("alike", "alike", "alike")
    if largest is None:
        results, combine = f"{results}, PART", (*combine, "max")
    rule = f"{', '.join(['i j', *known])} -> {results}"
    q, q_t, scale, *found = divided(f"quantize_tensor, {quantizer}", kernel, rule, combine)(
        x, *known.values()
    )
    # Products round their scale, and undo it. XLA would move this reshape to between the two.
    scale = lax.optimization_barrier(scale.reshape(()))
    if largest is None:
        largest = lax.bitcast_convert_type(found[0], jnp.float32)
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
    both = partial(quantize.quantize_lines, fmt=quantizer.fmt)
    q, q_t = divided("quantize_lines", both, "i j, i, j -> i j, j i")(
        x, reciprocal(rows), reciprocal(columns)
    )
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


def _finds_amax(quantizer: Quantizer, state: AmaxState | None) -> bool:
    """Whether the kernel for a single scale also takes the amaxes."""
    return isinstance(quantizer, Unit) or (isinstance(quantizer, Delayed) and state is not None)


_LONG = 64  # entries of a history; a kernel reads one after the other
_ROUNDINGS = (None, "power_of_two")  # of scales that are not of blocks
_BLOCKS = {(128, 1), (128, 128), (32, 1)}
_KERNELS: dict[type[Quantizer], Callable[..., BothWays]] = {
    Unit: _unit,
    Current: _current,
    Delayed: _delayed,
    Rowwise: _rowwise,
    Blockwise: _blockwise,
}
