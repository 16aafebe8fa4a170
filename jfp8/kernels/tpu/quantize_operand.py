"""A matrix, quantized for both of its matmuls on TPUs.

Pallas kernels read it once for all results. If the compiler shards it over TPUs in a way that is
not known while JAX traces, no kernel can run, and XLA quantizes: see `by_xla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.tpu import quantize_by_xla as by_xla
from jfp8.kernels.tpu import quantize_kernels
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
    """A matrix, and the dtype to which it is cast before it is quantized; None for no cast."""

    array: jax.Array
    dtype: np.dtype | None

    def values(self) -> jax.Array:
        """Return the matrix as cast by XLA."""
        return self.array if self.dtype is None else self.array.astype(self.dtype)


# A matrix quantized for sums over its rows and over its columns, and its amax, or amaxes of slices.
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
    """Return a matrix in the form of both of its matmuls; None if no quantizer below quantizes it.

    It is cast to `dtype` first. Without `kernels` XLA quantizes, which can shard the matrix; with
    `axes`, over which it is sharded, each TPU runs the kernels on its shard.
    """
    x, quantizer = Matrix(array, dtype), first.quantizer
    uses = [first] if second is None else [first, second]
    if quantizer is None or not _is_taken(array, quantizer, uses):
        return None
    by = _ByKernels(axes) if kernels else _ByXla()
    if isinstance(quantizer, Blockwise):
        if not kernels and not all(_multiplies_values(use.product) for use in uses):
            return None
        if not kernels and EXPLAINING.value is not None:
            return None  # by codes and scales, which a report names: the matmul is in bf16, too
        straight, other, largest = by.blocks(quantizer, x)
    elif isinstance(quantizer, Rowwise):
        straight, other, largest = _lines(quantizer, x, by)
    else:
        straight, other, largest = _one_scale(quantizer, x, state, by)
    if first.contracting == (0,):
        straight, other = other, straight
    return straight, None if second is None else other, largest


def _is_taken(array: jax.Array, quantizer: Quantizer, uses: list[Use]) -> bool:
    """Return True if this file computes the results of `quantizer`, to the same bytes."""
    if array.dtype == jnp.float16 or any(size % LANES or not size for size in array.shape):
        return False
    return (
        all(use.quantizer == quantizer and use.product.rotation is None for use in uses)
        and type(quantizer) in (Unit, Current, Delayed, Rowwise, Blockwise)
        and quantizer.rounding == "nearest_even"
        and quantizer.fmt in HARDWARE_FORMATS
        and quantizer.block in (None, (128, 1), (128, 128), (32, 1), (32, 32))
    )


def _multiplies_values(product: Product) -> bool:
    """Return True if both operands are in blocks whose values bf16 represents exactly."""
    in_blocks = [q is not None and q.block is not None for q in (product.lhs, product.rhs)]
    return all(in_blocks) and product.powers_of_two


def _one_scale(
    quantizer: Quantizer, x: Matrix, state: AmaxState | None, by: _ByXla | _ByKernels
) -> Quantized:
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
    data, largest = by.cast(x, reciprocal(scale), quantizer.fmt)
    q = ScaledArray(data, scale)
    return q, q, largest


def _lines(quantizer: Rowwise, x: Matrix, by: _ByXla | _ByKernels) -> Quantized:
    largest = by.amaxes(x)
    rounding = quantizer.scale_rounding
    scales = [scale_from_amax(a, quantizer.fmt, scale_rounding=rounding) for a in largest]
    rows, columns = map(reciprocal, scales)
    data = by.cast_lines(x, rows, columns, quantizer.fmt)
    straight, other = map(ScaledArray, data, scales)
    return straight, other, largest[0].reshape(-1)


class _ByXla:
    """Quantize by XLA, which can shard the matrix."""

    def cast(self, x: Matrix, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
        """Return codes and amaxes, by the reciprocal of the scale, f32[]."""
        values = x.values()
        return by_xla.cast(values, inverse, fmt), by_xla.amax(values).reshape(())

    def amaxes(self, x: Matrix) -> tuple[jax.Array, jax.Array]:
        """Return the amaxes of rows and of columns, f32[m, 1] and f32[1, n]."""
        values = x.values()
        return by_xla.amax(values, (1,)), by_xla.amax(values, (0,))

    def cast_lines(
        self, x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
    ) -> tuple[jax.Array, jax.Array]:
        """Return codes by row and by column, by the reciprocals of the scales."""
        values = x.values()
        return by_xla.cast(values, rows, fmt), by_xla.cast(values, columns, fmt)

    def blocks(self, quantizer: Blockwise, x: Matrix) -> Quantized:
        values, (along, across) = x.values(), quantizer.block_size
        how = values, quantizer.fmt, along, quantizer.scale_rounding
        if across == 1:
            return *by_xla.values_in_blocks(*how), by_xla.amax(values).reshape(())
        rounded = by_xla.values_in_tiles(*how)
        return rounded, rounded, by_xla.amax(values).reshape(())


@dataclass(frozen=True)
class _ByKernels:
    """Quantize by Pallas kernels, with the results of `_ByXla`; codes and scales of blocks."""

    axes: OfMatrix | None  # over which the matrix is sharded; None if it is not

    def cast(self, x: Matrix, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
        def cast(array, inverse):
            data, bits = quantize_kernels.quantize_tensor(array, inverse, fmt, dtype=x.dtype)
            return data, lax.bitcast_convert_type(bits, jnp.float32).reshape(-1)

        quantize = on_each(self.axes, cast, "i j, ONE ONE -> i j, PART")
        return quantize(x.array, inverse.reshape(1, 1))

    def amaxes(self, x: Matrix) -> tuple[jax.Array, jax.Array]:
        def amaxes(array):
            parts = quantize_kernels.line_amaxes(array, dtype=x.dtype)
            found = [jnp.max(bits, 0) for bits in parts]
            if self.axes is not None:  # the rest of a row is with the other columns
                parts = zip(found, self.axes[::-1], strict=True)
                found = [lax.pmax(bits, apart) if apart else bits for bits, apart in parts]
            rows, columns = (lax.bitcast_convert_type(bits, jnp.float32) for bits in found)
            return rows[:, None], columns[None]

        return on_each(self.axes, amaxes, "i j -> i ONE, ONE j")(x.array)

    def cast_lines(
        self, x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
    ) -> tuple[jax.Array, jax.Array]:
        cast = partial(quantize_kernels.quantize_lines, fmt=fmt, dtype=x.dtype)
        rule = "i j, i ONE, ONE j -> i j, i j"
        return on_each(self.axes, cast, rule)(x.array, rows, columns)

    def blocks(self, quantizer: Blockwise, x: Matrix) -> Quantized:
        along, across = quantizer.block_size
        how = {"fmt": quantizer.fmt, "block": along, "scale_rounding": quantizer.scale_rounding}
        how |= {"dtype": x.dtype}
        kernel = quantize_kernels.quantize_blocks
        kernel = partial(kernel if across == 1 else quantize_kernels.quantize_tiles, **how)
        if across > 1:
            data, scale = on_each(self.axes, kernel, f"i j -> i j, i/{along} j")(x.array)
            q = ScaledArray(data, _e8m0(scale[:, ::along]))
            return q, q, amax(x.values())
        rule = f"i j -> i j, j/{along} i, i j, i/{along} j"
        data, s, data_other, s_other = on_each(self.axes, kernel, rule)(x.array)
        straight, other = ScaledArray(data, _e8m0(s.T)), ScaledArray(data_other, _e8m0(s_other))
        return straight, other, amax(x.values())


def _e8m0(scale: jax.Array) -> jax.Array:
    return codes_to_format(scale, E8M0FNU) if scale.dtype == jnp.uint8 else scale
