"""``dot_general`` on TPUs: operands quantized in one read, and no transposed copies.

A TPU's matrix units take operands in any layout, so that one array of codes serves both directions
wherever one scale does. Pallas kernels read a tensor once for all that they make of it. Where the
compiler divides tensors among TPUs no kernel can run, and XLA quantizes: see `tpu.by_xla`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.job import HARDWARE_FORMATS, Job, are_powers_of_two, as_matrices
from jfp8.matmul.tpu import by_xla
from jfp8.matmul.tpu.tiles import LANES
from jfp8.products.cast_later import CastLater, as_array
from jfp8.products.dot import Dot
from jfp8.products.made import Made
from jfp8.products.observers import OBSERVER
from jfp8.products.operation import Kind, Operand, Sums, Use
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.casts import codes_to_format
from jfp8.scaling.formats import E8M0FNU, Format
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import amax, reciprocal, scale_from_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.context import Tpu, is_explaining

Matrix: TypeAlias = jax.Array | CastLater | Made

# A matrix quantized for sums over its rows and over its columns, and its amax, or those of parts.
Quantized: TypeAlias = tuple[Operand, Operand, jax.Array]


def quantized_for_both(
    x: Matrix, first: Use, second: Use | None, state: AmaxState | None, *, kernels: bool
) -> tuple[Operand, Operand | None, jax.Array] | None:
    """A matrix as both of its products take it; None if the quantizer is none of those below.

    With `kernels` by Pallas kernels, else by XLA alone, which can divide the matrix.
    """
    quantizer = first.quantizer
    if quantizer is None or (second is not None and second.quantizer != quantizer):
        return None
    if not is_supported(quantizer):
        return None
    if any(use is not None and use.product.rotation is not None for use in (first, second)):
        return None
    if any(size % LANES or not size for size in x.shape) or _read(x)[0].dtype == jnp.float16:
        return None
    if kernels:
        found = _BY_KERNELS[type(quantizer)](quantizer, x, state)
    elif isinstance(quantizer, Blockwise):
        if not all(use is None or _multiplies_values(use.product) for use in (first, second)):
            return None
        if is_explaining():
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
    return all(in_blocks) and product.powers_of_two and product.output is None


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
        scale = scale_from_amax(amax(as_array(x)), quantizer.fmt, scale_rounding=rounding)
    elif state is None:
        assert isinstance(quantizer, Delayed)
        scale = quantizer.scale(amax(as_array(x)), None)
    else:
        assert isinstance(quantizer, Delayed)
        # The current amax matters only while the history is empty, and is computed only then.
        none_yet = quantizer.expected(state) <= 0
        zero = lambda x: same_varying_axes((jnp.zeros((), jnp.float32), x))[0]
        observed = lax.cond(none_yet, lambda x: amax(as_array(x)), zero, x)
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
    values = as_array(x)
    return by_xla.cast(values, inverse, fmt), by_xla.amax(values).reshape(())


def _amaxes_by_xla(x: Matrix) -> tuple[jax.Array, jax.Array]:
    values = as_array(x)
    return by_xla.amax(values, (1,)), by_xla.amax(values, (0,))


def _cast_lines_by_xla(
    x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    values = as_array(x)
    return by_xla.cast(values, rows, fmt), by_xla.cast(values, columns, fmt)


def _blockwise_by_xla(quantizer: Blockwise, x: Matrix) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, (along, across) = as_array(x), quantizer.block_size
    how = values, quantizer.fmt, along, quantizer.scale_rounding
    if across > 1:
        rounded = by_xla.values_in_tiles(*how)
        return rounded, rounded, by_xla.amax(values).reshape(())
    return *by_xla.values_in_blocks(*how), by_xla.amax(values).reshape(())


# By kernels.


def _read(x: Matrix) -> tuple[jax.Array, np.dtype | None]:
    """An array in memory, and to what a kernel casts it as it reads it."""
    return (x.array, x.dtype) if isinstance(x, CastLater) else (as_array(x), None)


def _cast_by_kernel(x: Matrix, inverse: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    from jfp8.matmul.tpu.quantize import quantize_tensor

    array, dtype = _read(x)
    data, bits = quantize_tensor(array, inverse.reshape(1, 1), fmt, dtype=dtype)
    return data, lax.bitcast_convert_type(bits, jnp.float32).reshape(-1)


def _amaxes_by_kernel(x: Matrix) -> tuple[jax.Array, jax.Array]:
    from jfp8.matmul.tpu.quantize import line_amaxes

    array, dtype = _read(x)
    found = line_amaxes(array, dtype=dtype)
    rows, columns = (lax.bitcast_convert_type(jnp.max(bits, 0), jnp.float32) for bits in found)
    return rows[:, None], columns[None]


def _cast_lines_by_kernel(
    x: Matrix, rows: jax.Array, columns: jax.Array, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    from jfp8.matmul.tpu.quantize import quantize_lines

    array, dtype = _read(x)
    return quantize_lines(array, rows, columns, fmt, dtype=dtype)


def _rowwise(quantizer: Rowwise, x: Matrix, state: AmaxState | None) -> Quantized:
    del state
    return _lines(quantizer, x, _amaxes_by_kernel, _cast_lines_by_kernel)


def _blockwise(quantizer: Blockwise, x: Matrix, state: AmaxState | None) -> Quantized:
    from jfp8.matmul.tpu import quantize

    del state
    array, dtype = _read(x)
    (along, across), fmt, rounding = quantizer.block_size, quantizer.fmt, quantizer.scale_rounding
    if across > 1:
        data, scale = quantize.quantize_tiles(array, fmt, along, rounding, dtype=dtype)
        q = ScaledArray(data, _e8m0(scale[:, ::along]))
        return q, q, amax(as_array(x))
    data, s, data_other, s_other = quantize.quantize_blocks(
        array, fmt, along, rounding, dtype=dtype
    )
    straight, other = ScaledArray(data, _e8m0(s.T)), ScaledArray(data_other, _e8m0(s_other))
    return straight, other, amax(as_array(x))


def _e8m0(scale: jax.Array) -> jax.Array:
    return codes_to_format(scale, E8M0FNU) if scale.dtype == jnp.uint8 else scale


_by_one_scale = partial(_one_scale, cast=_cast_by_kernel)
_BY_KERNELS: dict[type[Quantizer], Callable[..., Quantized]] = {
    Unit: _by_one_scale,
    Current: _by_one_scale,
    Delayed: _by_one_scale,
    Rowwise: _rowwise,
    Blockwise: _blockwise,
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias"],
    meta_fields=["shapes", "dtypes", "dimension_numbers", "implementation", "tpu"],
)
@dataclass(frozen=True)
class DotOnTpu(Dot):
    """`Dot` of two matrices, each quantized in one step for both of its products.

    Attributes:
      tpu: on which they are.
      bias: ``[n]``, which is added to y; None: none is.
    """

    tpu: Tpu
    bias: jax.Array | None = None

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array | CastLater | Made,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        del role
        return quantized_for_both(x, first, second, state, kernels=not self.tpu.divides)

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        bias = self.bias if kind == "fprop" else None
        sums = sums._replace(tpu=self.tpu, bias=bias)
        if isinstance(first, ScaledArray) != isinstance(second, ScaledArray):
            job = Job(self.dimension_numbers, self.dtype_of(kind), *sums)
            pairs = zip((first, second), self.contracting(kind), strict=True)
            first, second = (_in_bf16_if_exact(x, summed, job) for x, summed in pairs)
        return super().multiply(kind, first, second, sums)


def _in_bf16_if_exact(x: Operand, summed: tuple[int, ...], job: Job) -> Operand:
    """The values of bytes beside an operand that is in bf16 already."""
    if not isinstance(x, ScaledArray) or not are_powers_of_two(x, summed, job):
        return x
    return scaled_values(x).astype(jnp.bfloat16)


def on_tpu(
    tpu: Tpu, dot: Dot, lhs: jax.Array, rhs: Operand, bias: jax.Array | None
) -> tuple[Dot, jax.Array, Operand]:
    """`dot` and its operands as matrices, if that is possible."""
    try:
        lhs, rhs, numbers = as_matrices(lhs, rhs, dot.dimension_numbers)
    except ValueError:  # an rhs in bytes, whose blocks are not those of a matrix
        return dot, lhs, rhs
    shapes = lhs.shape, rhs.shape
    # Statistics are of the product alone.
    by_kernel = bias is not None and not tpu.divides and OBSERVER.value is None
    added = lax.stop_gradient(bias) if by_kernel else None
    return DotOnTpu(shapes, dot.dtypes, numbers, dot.implementation, tpu, added), lhs, rhs
