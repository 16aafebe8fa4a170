"""A matrix, quantized for both of its products on TPUs.

Pallas kernels read it once for all that they make of it. Where the compiler divides it among TPUs
in a way that is not known while JAX traces, no kernel can run, and XLA quantizes: see `by_xla`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.tpu import quantize_by_xla as by_xla
from jfp8.kernels.tpu.sharded import OfMatrix, on_each
from jfp8.kernels.tpu.tiles import LANES
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.products.operation import Operand, Use
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_to_format
from jfp8.scaling.formats import E8M0FNU, Format
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import amax, reciprocal, scale_from_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.notes import EXPLAINING


class Matrix(NamedTuple):
    """A matrix, and the dtype to which it is cast before it is quantized; None: to none."""

    array: jax.Array
    dtype: np.dtype | None

    def values(self) -> jax.Array:
        """Return the matrix as XLA casts it."""
        return self.array if self.dtype is None else self.array.astype(self.dtype)


# A matrix quantized for sums over its rows and over its columns, and its amax, or those of parts.
Quantized: TypeAlias = tuple[Operand, Operand, jax.Array]


def quantized_for_both(
    array: jax.Array,
    first: Use,
    second: Use | None,
    state: AmaxState | None,
    dtype: np.dtype | None,
    *,
    kernels: bool,
    axes: OfMatrix | None = None,
) -> tuple[Operand, Operand | None, jax.Array] | None:
    """Return a matrix as both of its products take it; None if no quantizer below quantizes it.

    Args:
      dtype: to which it is cast first; None: to none.
      kernels: by Pallas kernels; else by XLA alone, which can divide the matrix.
      axes: over which it is divided, if each TPU runs the kernels on its part.
    """
    x, quantizer = Matrix(array, dtype), first.quantizer
    uses = [first] if second is None else [first, second]
    if quantizer is None or not _is_taken(array, quantizer, uses):
        return None
    if kernels:
        found = _BY_KERNELS[type(quantizer)](quantizer, x, state, axes)
    elif isinstance(quantizer, Blockwise):
        if not all(_multiplies_values(use.product) for use in uses):
            return None
        if EXPLAINING.value is not None:
            return None  # by codes and scales, which a report names: the product is in bf16, too
        found = _blockwise_by_xla(quantizer, x)
    elif isinstance(quantizer, Rowwise):
        found = _lines(quantizer, x, _amaxes_by_xla, _cast_lines_by_xla)
    else:
        found = _one_scale(quantizer, x, state, _cast_by_xla)
    straight, other, largest = found
    if first.contracting == (0,):
        straight, other = other, straight
    return straight, None if second is None else other, largest


def _is_taken(array: jax.Array, quantizer: Quantizer, uses: list[Use]) -> bool:
    if array.dtype == jnp.float16 or any(size % LANES or not size for size in array.shape):
        return False
    alike = all(use.quantizer == quantizer and use.product.rotation is None for use in uses)
    return alike and is_supported(quantizer)


def is_supported(quantizer: Quantizer) -> bool:
    """Whether this file does what `quantizer` does, to the same bytes."""
    return (
        type(quantizer) in _BY_KERNELS
        and quantizer.rounding == "nearest_even"
        and quantizer.fmt in HARDWARE_FORMATS
        and quantizer.block in (None, (128, 1), (128, 128), (32, 1), (32, 32))
    )


def _multiplies_values(product: Product) -> bool:
    """Whether both operands are in blocks whose values bf16 holds exactly."""
    in_blocks = [q is not None and q.block is not None for q in (product.lhs, product.rhs)]
    return all(in_blocks) and product.powers_of_two


def _one_scale(
    quantizer: Quantizer,
    x: Matrix,
    state: AmaxState | None,
    cast: Callable[..., Any],
) -> Quantized:
    """By one scale for both directions.

    Args:
      cast: of `x`, the reciprocal of the scale, f32[], and the format: codes and amaxes.
    """
    if isinstance(quantizer, Unit):
        scale = jnp.ones((), jnp.float32)
    elif isinstance(quantizer, Current):
        rounding = quantizer.scale_rounding
        scale = scale_from_amax(amax(x.values()), quantizer.fmt, scale_rounding=rounding)
    elif state is None:
        assert isinstance(quantizer, Delayed)
        scale = quantizer.scale(amax(x.values()), None)
    else:
        assert isinstance(quantizer, Delayed)
        # The current amax matters only while the history is empty, and is computed only then.
        none_yet = quantizer.expected(state) <= 0
        zero = lambda x: same_varying_axes((jnp.zeros((), jnp.float32), x))[0]
        observed = lax.cond(none_yet, lambda a: amax(x._replace(array=a).values()), zero, x.array)
        scale = quantizer.scale(observed, state)
    data, largest = cast(x, reciprocal(scale), quantizer.fmt)
    q = ScaledArray(data, scale)
    return q, q, largest


def _lines(
    quantizer: Rowwise, x: Matrix, amaxes: Callable[..., Any], cast: Callable[..., Any]
) -> Quantized:
    """By a scale for each row, and by one for each column.

    Args:
      amaxes: of `x`, those of its rows and columns, f32[m, 1] and f32[1, n].
      cast: of `x`, the reciprocals of the scales and the format: codes by row and by column.
    """
    largest = amaxes(x)
    rounding = quantizer.scale_rounding
    scales = [scale_from_amax(a, quantizer.fmt, scale_rounding=rounding) for a in largest]
    data = cast(x, *map(reciprocal, scales), quantizer.fmt)
    straight, other = map(ScaledArray, data, scales)
    return straight, other, largest[0].reshape(-1)


# By XLA.


def _cast_by_xla(x: Matrix, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    values = x.values()
    return by_xla.cast(values, inverse, fmt), by_xla.amax(values).reshape(())


def _amaxes_by_xla(x: Matrix) -> tuple[jax.Array, jax.Array]:
    values = x.values()
    return by_xla.amax(values, (1,)), by_xla.amax(values, (0,))


def _cast_lines_by_xla(
    x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    values = x.values()
    return by_xla.cast(values, rows, fmt), by_xla.cast(values, columns, fmt)


def _blockwise_by_xla(quantizer: Blockwise, x: Matrix) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, (along, across) = x.values(), quantizer.block_size
    how = values, quantizer.fmt, along, quantizer.scale_rounding
    if across > 1:
        rounded = by_xla.values_in_tiles(*how)
        return rounded, rounded, by_xla.amax(values).reshape(())
    return *by_xla.values_in_blocks(*how), by_xla.amax(values).reshape(())


# By kernels.


def _cast_by_kernel(
    axes: OfMatrix | None, x: Matrix, inverse: jax.Array, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    from jfp8.kernels.tpu.quantize_kernels import quantize_tensor

    array, dtype = x

    def cast(array, inverse):
        data, bits = quantize_tensor(array, inverse, fmt, dtype=dtype)
        return data, lax.bitcast_convert_type(bits, jnp.float32).reshape(-1)

    return on_each(axes, cast, "i j, ONE ONE -> i j, PART")(array, inverse.reshape(1, 1))


def _amaxes_by_kernel(axes: OfMatrix | None, x: Matrix) -> tuple[jax.Array, jax.Array]:
    from jfp8.kernels.tpu.quantize_kernels import line_amaxes

    array, dtype = x

    def amaxes(array):
        found = [jnp.max(bits, 0) for bits in line_amaxes(array, dtype=dtype)]
        if axes is not None:  # the rest of a row is where other columns are
            found = [lax.pmax(b, apart) if apart else b for b, apart in zip(found, axes[::-1])]
        rows, columns = (lax.bitcast_convert_type(bits, jnp.float32) for bits in found)
        return rows[:, None], columns[None]

    return on_each(axes, amaxes, "i j -> i ONE, ONE j")(array)


def _cast_lines_by_kernel(
    axes: OfMatrix | None, x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    from jfp8.kernels.tpu.quantize_kernels import quantize_lines

    array, dtype = x
    cast = partial(quantize_lines, fmt=fmt, dtype=dtype)
    rule = "i j, i ONE, ONE j -> i j, i j"
    return on_each(axes, cast, rule)(array, rows, columns)


def _one_scale_by_kernel(
    quantizer: Quantizer, x: Matrix, state: AmaxState | None, axes: OfMatrix | None
) -> Quantized:
    return _one_scale(quantizer, x, state, partial(_cast_by_kernel, axes))


def _rowwise_by_kernel(
    quantizer: Rowwise, x: Matrix, state: AmaxState | None, axes: OfMatrix | None
) -> Quantized:
    del state
    amaxes, cast = (partial(f, axes) for f in (_amaxes_by_kernel, _cast_lines_by_kernel))
    return _lines(quantizer, x, amaxes, cast)


def _blockwise_by_kernel(
    quantizer: Blockwise, x: Matrix, state: AmaxState | None, axes: OfMatrix | None
) -> Quantized:
    from jfp8.kernels.tpu import quantize_kernels as quantize

    del state
    array, dtype = x
    along, across = quantizer.block_size
    kernel = quantize.quantize_blocks if across == 1 else quantize.quantize_tiles
    how = {"fmt": quantizer.fmt, "block": along, "scale_rounding": quantizer.scale_rounding}
    if across > 1:
        rule = f"i j -> i j, i/{along} j"
        data, scale = on_each(axes, partial(kernel, **how, dtype=dtype), rule)(array)
        q = ScaledArray(data, _e8m0(scale[:, ::along]))
        return q, q, amax(x.values())
    rule = f"i j -> i j, j/{along} i, i j, i/{along} j"
    blocks = on_each(axes, partial(kernel, **how, dtype=dtype), rule)
    data, s, data_other, s_other = blocks(array)
    straight, other = ScaledArray(data, _e8m0(s.T)), ScaledArray(data_other, _e8m0(s_other))
    return straight, other, amax(x.values())


def _e8m0(scale: jax.Array) -> jax.Array:
    return codes_to_format(scale, E8M0FNU) if scale.dtype == jnp.uint8 else scale


_BY_KERNELS: dict[type[Quantizer], Callable[..., Quantized]] = {
    Unit: _one_scale_by_kernel,
    Current: _one_scale_by_kernel,
    Delayed: _one_scale_by_kernel,
    Rowwise: _rowwise_by_kernel,
    Blockwise: _blockwise_by_kernel,
}
