"""``dot_general`` on TPUs: operands quantized in one read, and no transposed copies.

A TPU's matrix units take operands in any layout, so that one array of codes serves both directions
wherever one scale does. XLA does the rest element by element, but reads a tensor once more for its
amax, and lays blocks of scales out anew; Pallas kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.job import HARDWARE_FORMATS
from jfp8.matmul.tpu.tiles import LANES
from jfp8.products.cast_later import CastLater, as_array
from jfp8.products.made import Made
from jfp8.products.operation import Operand, Use
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.casts import codes_to_format
from jfp8.scaling.formats import E8M0FNU
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import amax, reciprocal, scale_from_amax
from jfp8.tracing.divided import divided

Matrix: TypeAlias = jax.Array | CastLater | Made

# A matrix quantized for sums over its rows and over its columns, and its amax, or those of parts.
Quantized: TypeAlias = tuple[ScaledArray, ScaledArray, jax.Array]


def quantized_for_both(
    x: Matrix, first: Use, second: Use | None, state: AmaxState | None
) -> tuple[Operand, Operand | None, jax.Array] | None:
    """A matrix as both of its products take it; None if the quantizer is none of those below."""
    quantizer = first.quantizer
    if quantizer is None or (second is not None and second.quantizer != quantizer):
        return None
    if not is_supported(quantizer) or any(size % LANES or not size for size in x.shape):
        return None
    straight, other, largest = _QUANTIZE[type(quantizer)](quantizer, x, state)
    if first.contracting == (0,):
        straight, other = other, straight
    return straight, None if second is None else other, largest


def is_supported(quantizer: Quantizer) -> bool:
    """Whether this file does what `quantizer` does, to the same bytes."""
    return (
        type(quantizer) in _QUANTIZE
        and quantizer.rounding == "nearest_even"
        and quantizer.fmt in HARDWARE_FORMATS
        and quantizer.block in (None, (128, 1), (128, 128), (32, 1), (32, 32))
    )


def _read(x: Matrix) -> tuple[jax.Array, np.dtype | None]:
    """An array in memory, and to what a kernel casts it as it reads it."""
    if isinstance(x, CastLater):
        return x.array, x.dtype
    return as_array(x), None


def _with_one_scale(quantizer: Quantizer, x: Matrix, scale: jax.Array) -> Quantized:
    from jfp8.matmul.tpu import quantize

    array, dtype = _read(x)
    kernel = partial(quantize.quantize_tensor, fmt=quantizer.fmt, dtype=dtype)
    name = f"quantize_tensor_tpu, {quantizer.fmt.name}, {dtype}"
    call = divided(name, _in_whole_tiles(kernel), "i j, ONE -> i j, PART LANE", ("alike", "max"))
    data, bits = call(array, reciprocal(scale).reshape(1))
    q = ScaledArray(data, scale)
    return q, q, lax.bitcast_convert_type(bits, jnp.float32).reshape(-1)


def _in_whole_tiles(kernel: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., object]:
    """`kernel`, for parts of any size: those that it does not take get zeros behind."""

    def call(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        grown = lambda x: jnp.pad(x, [(0, -n % LANES if n > 1 else 0) for n in x.shape])
        cut = lambda y: y[: x.shape[0], : x.shape[1]] if y.dtype.itemsize == 1 else y
        first, second = kernel(*map(grown, (x, *others)))
        return cut(first), cut(second)

    return call


def _unit(quantizer: Unit, x: Matrix, state: AmaxState | None) -> Quantized:
    del state
    return _with_one_scale(quantizer, x, jnp.ones((), jnp.float32))


def _current(quantizer: Current, x: Matrix, state: AmaxState | None) -> Quantized:
    del state
    largest = amax(as_array(x))
    scale = scale_from_amax(largest, quantizer.fmt, scale_rounding=quantizer.scale_rounding)
    q, again, _ = _with_one_scale(quantizer, x, scale)
    return q, again, largest


def _delayed(quantizer: Delayed, x: Matrix, state: AmaxState | None) -> Quantized:
    if state is None:
        observed = amax(as_array(x))
    else:
        # The current amax matters only while the history is empty, and is computed only then.
        none_yet = quantizer.expected(state) <= 0
        zero = lambda x: jnp.zeros((), jnp.float32)
        observed = lax.cond(none_yet, lambda x: amax(as_array(x)), zero, x)
    return _with_one_scale(quantizer, x, quantizer.scale(observed, state))


def _rowwise(quantizer: Rowwise, x: Matrix, state: AmaxState | None) -> Quantized:
    from jfp8.matmul.tpu import quantize

    del state
    array, dtype = _read(x)
    find = divided(
        f"line_amaxes_tpu, {dtype}", partial(_line_amaxes, dtype=dtype), "i j -> i, j", "max"
    )
    largest = find(array)
    rows, columns = (
        scale_from_amax(found, quantizer.fmt, scale_rounding=quantizer.scale_rounding)
        for found in (largest[0][:, None], largest[1][None])
    )
    kernel = partial(quantize.quantize_lines, fmt=quantizer.fmt, dtype=dtype)
    name = f"quantize_lines_tpu, {quantizer.fmt.name}, {dtype}"
    call = divided(name, _in_whole_tiles(kernel), "i j, i ONE, ONE j -> i j, i j")
    q, q_other = call(array, reciprocal(rows), reciprocal(columns))
    return ScaledArray(q, rows), ScaledArray(q_other, columns), largest[0]


def _line_amaxes(x: jax.Array, dtype: np.dtype | None) -> tuple[jax.Array, jax.Array]:
    """The amaxes of rows and columns, f32[m] and f32[n]."""
    from jfp8.matmul.tpu.quantize import line_amaxes

    m, n = x.shape
    found = line_amaxes(jnp.pad(x, [(0, -m % LANES), (0, -n % LANES)]), dtype=dtype)
    rows, columns = (lax.bitcast_convert_type(jnp.max(bits, 0), jnp.float32) for bits in found)
    return rows[:m], columns[:n]


def _blockwise(quantizer: Blockwise, x: Matrix, state: AmaxState | None) -> Quantized:
    from jfp8.matmul.tpu import quantize

    del state
    array, dtype = _read(x)
    along, across = quantizer.block_size
    how = {
        "fmt": quantizer.fmt,
        "block": along,
        "scale_rounding": quantizer.scale_rounding,
        "dtype": dtype,
    }
    name = f"{along}, {quantizer.fmt.name}, {quantizer.scale_rounding}, {dtype}"
    if across > 1:
        rule = f"i j -> i j, i/{along} j"
        kernel = partial(quantize.quantize_tiles, **how)
        q, s = divided(f"quantize_tiles_tpu, {name}", kernel, rule)(array)
        q = ScaledArray(q, _e8m0(s[:, ::along]))
        return q, q, amax(as_array(x))
    rule = f"i j -> i j, j/{along} i, i j, i/{along} j"
    kernel = partial(quantize.quantize_blocks, **how)
    q, s, q_other, s_other = divided(f"quantize_blocks_tpu, {name}", kernel, rule)(array)
    straight, other = ScaledArray(q, _e8m0(s.T)), ScaledArray(q_other, _e8m0(s_other))
    return straight, other, amax(as_array(x))


def _e8m0(scale: jax.Array) -> jax.Array:
    return codes_to_format(scale, E8M0FNU) if scale.dtype == jnp.uint8 else scale


_QUANTIZE: dict[type[Quantizer], Callable[..., Quantized]] = {
    Unit: _unit,
    Current: _current,
    Delayed: _delayed,
    Rowwise: _rowwise,
    Blockwise: _blockwise,
}
