"""A matrix, quantized for both of its matmuls on TPUs.

Pallas kernels read it once for all results. If the compiler shards it over TPUs in a way that is
not known while JAX traces, no kernel can run, and XLA quantizes, in forms that its compiler fuses.
Other forms give the same results, but move up to ten times the bytes: blocks along rows cross the
tiles of 8x128 elements in which a TPU stores a matrix, and an amax of integers is computed in a
separate read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jfp8.kernels.tpu import quantize_kernels
from jfp8.kernels.tpu.sharded import LANES, OfMatrix, on_each
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.products.operation import Operand, Use
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import codes_to_format, convert, magnitude_bits
from jfp8.scaling.formats import E8M0FNU, Format
from jfp8.scaling.history import AmaxState
from jfp8.scaling.quantization import reciprocal_of_block_scale
from jfp8.scaling.scales import ScaleRounding, amax, reciprocal, scale_from_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.notes import EXPLAINING

SUBLANES = 8  # rows of a tile of LANES columns, in which a TPU stores a matrix

# A matrix quantized for sums over its rows and over its columns, and its amax, or amaxes of slices.
ForBoth: TypeAlias = tuple[Operand, Operand, jax.Array]


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
    quantizer = first.quantizer
    uses = [first] if second is None else [first, second]
    if quantizer is None or not _is_taken(array, quantizer, uses):
        return None
    x = (_ByKernels if kernels else _ByXla)(array, dtype, axes)
    if isinstance(quantizer, Blockwise):
        if not kernels and not all(_multiplies_values(use.product) for use in uses):
            return None
        if not kernels and EXPLAINING.value is not None:
            return None  # by codes and scales, which a report names: the matmul is in bf16, too
        straight, other, largest = x.blocks(quantizer)
    elif isinstance(quantizer, Rowwise):
        straight, other, largest = _lines(quantizer, x)
    else:
        straight, other, largest = _one_scale(quantizer, x, state)
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


def _one_scale(quantizer: Quantizer, x: _ByXla | _ByKernels, state: AmaxState | None) -> ForBoth:
    if isinstance(quantizer, Unit):
        scale = jnp.ones((), jnp.float32)
    elif isinstance(quantizer, Current):
        rounding = quantizer.scale_rounding
        scale = scale_from_amax(amax(x.values), quantizer.fmt, scale_rounding=rounding)
    else:
        assert isinstance(quantizer, Delayed)
        observe = lambda array: amax(replace(x, array=array).values)
        if state is None:
            observed = observe(x.array)
        else:
            # The current amax matters only while the history is empty, and is computed only then.
            none_yet = quantizer.expected(state) <= 0
            zero = lambda x: same_varying_axes((jnp.zeros((), jnp.float32), x))[0]
            observed = lax.cond(none_yet, observe, zero, x.array)
        scale = quantizer.scale(observed, state)
    data, largest = x.cast(reciprocal(scale), quantizer.fmt)
    q = ScaledArray(data, scale)
    return q, q, largest


def _lines(quantizer: Rowwise, x: _ByXla | _ByKernels) -> ForBoth:
    largest = x.amaxes()
    rounding = quantizer.scale_rounding
    scales = [scale_from_amax(a, quantizer.fmt, scale_rounding=rounding) for a in largest]
    data = x.cast_lines([reciprocal(scale) for scale in scales], quantizer.fmt)
    straight, other = map(ScaledArray, data, scales)
    return straight, other, largest[0].reshape(-1)


@dataclass(frozen=True)
class _Matrix:
    array: jax.Array
    dtype: np.dtype | None  # to which it is cast before it is quantized; None for no cast
    axes: OfMatrix | None  # over which it is sharded; None if it is not, or if unknown

    @property
    def values(self) -> jax.Array:
        """Return the matrix as cast by XLA."""
        return self.array if self.dtype is None else self.array.astype(self.dtype)


class _ByKernels(_Matrix):
    """Quantize by Pallas kernels, with the results of `_ByXla`; codes and scales of blocks."""

    def cast(self, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
        def cast(array, inverse):
            data, bits = quantize_kernels.quantize_tensor(array, inverse, fmt, dtype=self.dtype)
            return data, lax.bitcast_convert_type(bits, jnp.float32).reshape(-1)

        quantize = on_each(self.axes, cast, "i j, ONE ONE -> i j, PART")
        return quantize(self.array, inverse.reshape(1, 1))

    def amaxes(self) -> tuple[jax.Array, jax.Array]:
        def amaxes(array):
            parts = quantize_kernels.line_amaxes(array, dtype=self.dtype)
            found = [jnp.max(bits, 0) for bits in parts]
            if self.axes is not None:  # the rest of a row is with the other columns
                parts = zip(found, self.axes[::-1], strict=True)
                found = [lax.pmax(bits, apart) if apart else bits for bits, apart in parts]
            rows, columns = (lax.bitcast_convert_type(bits, jnp.float32) for bits in found)
            return rows[:, None], columns[None]

        return on_each(self.axes, amaxes, "i j -> i ONE, ONE j")(self.array)

    def cast_lines(self, inverses: Sequence[jax.Array], fmt: Format) -> Sequence[jax.Array]:
        cast = partial(quantize_kernels.quantize_lines, fmt=fmt, dtype=self.dtype)
        rule = "i j, i ONE, ONE j -> i j, i j"
        return on_each(self.axes, cast, rule)(self.array, *inverses)

    def blocks(self, quantizer: Blockwise) -> ForBoth:
        block, across = quantizer.block_size
        how = {"fmt": quantizer.fmt, "block": block, "scale_rounding": quantizer.scale_rounding}
        how |= {"dtype": self.dtype}
        scaled = lambda data, scale: ScaledArray(
            data, codes_to_format(scale, E8M0FNU) if scale.dtype == jnp.uint8 else scale
        )
        if across > 1:
            kernel = partial(quantize_kernels.quantize_tiles, **how)
            data, scale = on_each(self.axes, kernel, f"i j -> i j, i/{block} j")(self.array)
            straight = other = scaled(data, scale[:, ::block])
        else:
            kernel = partial(quantize_kernels.quantize_blocks, **how)
            rule = f"i j -> i j, j/{block} i, i j, i/{block} j"
            data, s, data_other, s_other = on_each(self.axes, kernel, rule)(self.array)
            straight, other = scaled(data, s.T), scaled(data_other, s_other)
        return straight, other, amax(self.values)


class _ByXla(_Matrix):
    """Quantize by XLA, which can shard the matrix."""

    def cast(self, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
        """Return codes and amaxes, by the reciprocal of the scale, f32[]."""
        values = self.values
        return _cast(values, inverse, fmt), _amax(values).reshape(())

    def amaxes(self) -> tuple[jax.Array, jax.Array]:
        """Return the amaxes of rows and of columns, f32[m, 1] and f32[1, n]."""
        values = self.values
        return _amax(values, (1,)), _amax(values, (0,))

    def cast_lines(self, inverses: Sequence[jax.Array], fmt: Format) -> Sequence[jax.Array]:
        """Return codes by row and by column, by the reciprocals of the scales."""
        values = self.values
        return [_cast(values, inverse, fmt) for inverse in inverses]

    def blocks(self, quantizer: Blockwise) -> ForBoth:
        """Return values in bf16, which are exact for powers of two, and sufficient for a matmul.

        A matmul in bf16 would have to combine codes and scales first.
        """
        x, (block, across) = self.values, quantizer.block_size
        (m, n), how = x.shape, (quantizer.fmt, quantizer.scale_rounding)
        largest = _amax(x).reshape(())
        if across > 1:
            rows = x.reshape(m // block, block, n)
            by_column = _amax(rows, (1,)).reshape(m // block, n // block, block)
            by_block = jnp.repeat(_amax(by_column, (2,)), block, axis=2).reshape(m // block, 1, n)
            rounded = _stored(_rounded(rows, by_block, *how).reshape(x.shape))
            return rounded, rounded, largest
        in_columns = _in_columns(x, block, *how)
        if block != LANES:  # slices of the rows of a tile, through one transposed copy
            turned = lax.optimization_barrier(x.T)
            return _in_columns(turned, block, *how).T, in_columns, largest
        by_tile = (m // SUBLANES, SUBLANES, n // LANES, LANES)
        tiles = x.reshape(by_tile).transpose(0, 2, 1, 3)  # in storage order
        in_rows = _rounded(tiles, _amax(tiles, (3,)), *how)
        return _stored(in_rows.transpose(0, 2, 1, 3).reshape(x.shape)), in_columns, largest


def _cast(x: jax.Array, inverse: jax.Array, fmt: Format) -> jax.Array:
    """Return ``cast(x * inverse)``; finite values saturate, others become NaN."""
    wide = x.astype(jnp.float32)
    return convert((wide + wide * np.float32(0)) * inverse, fmt)  # a mask would be written


def _amax(x: jax.Array, axes: tuple[int, ...] = (0, 1)) -> jax.Array:
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


def _in_columns(x: jax.Array, block: int, fmt: Format, scale_rounding: ScaleRounding) -> jax.Array:
    blocks = x.reshape(-1, block, x.shape[1])
    return _stored(_rounded(blocks, _amax(blocks, (1,)), fmt, scale_rounding).reshape(x.shape))


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
