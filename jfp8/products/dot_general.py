"""`scaled_dot_general`: ``jax.lax.dot_general`` with quantized operands, forward and backward.

It is computed as the operation `Dot`, or as `ContractionLast` on GPUs where that is faster.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul import choice
from jfp8.matmul.choice import Implementation
from jfp8.matmul.job import (
    Job,
    Numbers,
    as_matrices,
    check_dimension_numbers,
    layout_of,
    multiply,
    plus_bias,
)
from jfp8.products.both_ways import has_kernel, quantize_both_ways
from jfp8.products.cast_later import CastLater
from jfp8.products.explicit_sharding import with_result_like
from jfp8.products.made import Followed, Made, Source, Then, source_of_matrix
from jfp8.products.observers import OBSERVER
from jfp8.products.on_tpu import quantized_for_both
from jfp8.products.operation import (
    How,
    Kind,
    Observed,
    Operand,
    Operation,
    State,
    Sums,
    Use,
    as_lhs,
    as_operand,
    check_out_dtype,
    has_scales_of,
    value_dtype,
    values_of,
)
from jfp8.products.vjp import multiply_quantized
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.history import AmaxState
from jfp8.tracing.context import Tpu, has_explicit_axes


def scaled_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe | str = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.dot_general`` with FP8 operands, forward and backward. ::

        fprop  y    = q(lhs) . q(rhs)
        dgrad  dlhs = q(dy) . q(rhs)^T
        wgrad  drhs = q(lhs)^T . q(dy)

    High precision in and out: `recipe` says how ``q`` quantizes each operand of each product. The
    products are summed in f32, scaled in f32 and rounded once. The gradient is straight-through. A
    NaN or Inf in an operand or gradient gives NaN in the result.

    Args:
      lhs, rhs: ``f32 | bf16 | f16`` arrays. `rhs` may be a `ScaledArray` instead: a weight that is
        only kept in FP8. It gets no gradient, unless it has a `ScaledArray.carrier`. Its bytes are
        used unchanged if it has the format that `recipe` requires and its scales: one, or one for
        each row or block as `recipe` has them in this product. Otherwise its values are quantized.
      dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: how each operand of each product is quantized; an object or its name.
      state: amax histories of this product, ``{"lhs", "rhs", "grad"}`` as `Recipe.init_state` makes
        them; they are read, never written. None: current scaling.
      sink: ``f32[3, 2050]`` zeros (`jfp8.scaling.init_sink`), whose cotangent carries the amaxes of
        lhs, rhs and grad out of the backward pass, for `advance`. With both `sink` and `state`,
        gradients use their history; without a sink, current scaling.
      key: random key for recipes that round stochastically. The bits are made from it and from the
        amax of the tensor that is rounded, so that one key serves all layers, steps, scan
        iterations and devices. None: the bits are made from the data alone, which is reproducible,
        but rounds the same tensor in the same way every time.
      preferred_element_type: floating dtype of the result; default: that of the promoted operands.
      implementation: see `scaled_matmul`.
      out_sharding: sharding of the result, as for ``jax.lax.dot_general``, on meshes with explicit
        axes.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives.

    Raises:
      TypeError: operands that are not real floating arrays of at most 32 bits; `recipe` is not a
        recipe.
      ValueError: dimension numbers or sizes that do not match; a `state` of another recipe; a
        `sink` of another shape or dtype; unknown `implementation`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 2.0)
    >>> loss = lambda w: jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    >>> jax.grad(loss)(w).shape
    (3, 4)
    """
    how = How(check_recipe(recipe), implementation)
    y, _ = observed_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        how,
        State(state, sink, key),
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return y


def observed_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    how: How,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
    source: Source | None = None,
    then: Then | None = None,
    bias: jax.Array | None = None,
) -> tuple[Any, Observed]:
    """`scaled_dot_general`, and the amaxes of its operands, which have no gradient.

    If the `source` of `lhs` is given, a kernel may make `lhs` itself. If it is known what follows
    `then`, whose projections are the last but one dimension of the result, this may be a
    `Followed`: then a kernel may make its gradient. A `bias` ``[n]`` is added to the result, by a
    kernel if that can.
    """
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    if has_explicit_axes():
        what: dict[str, Any] = {"dimension_numbers": dimension_numbers}
        result = {"preferred_element_type": preferred_element_type}
        reference = partial(lax.dot_general, **what, out_sharding=out_sharding)
        function = partial(observed_dot_general, **what, how=how, **result)
        y, observed = with_result_like(reference, function, lhs, rhs, state)
        return plus_bias(y, bias), observed
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    out_dtype = check_out_dtype(preferred_element_type, lhs, rhs, how)
    shape = layout_of(lhs.shape, rhs.shape, dimension_numbers).shape
    contracting = dimension_numbers[0][0]
    if how.recipe.resolved().matrices:
        # Blocks of scales run over the rows and columns of the matrices that are multiplied, across
        # the borders of the dimensions that form them.
        lhs, rhs, dimension_numbers = _matrices(lhs, rhs, dimension_numbers, how.recipe)
    dtypes = (np.dtype(lhs.dtype), value_dtype(rhs), out_dtype)
    dot = Dot((lhs.shape, rhs.shape), dtypes, dimension_numbers, how.implementation)
    operation: Operation = dot
    m, n, k = layout_of(lhs.shape, rhs.shape, dimension_numbers).sizes
    faster, in_bytes = None, isinstance(rhs, ScaledArray)
    if not dimension_numbers[1][0] and (not in_bytes or how.recipe.resolved().matrices):
        faster = contraction_last((m, n, k), dtypes, how.recipe, how.implementation)
        if in_bytes and faster is not None and faster.shapes[1] != (k, n):
            faster = None  # bytes are not padded
    if faster is not None:
        operation = faster
        lhs, rhs = _plain_matrices(lhs, rhs, dimension_numbers, faster.shapes)
    elif not dimension_numbers[1][0]:
        tpu = choice.quantizing_tpu(lhs, how.implementation)
        if tpu is not None:
            operation, lhs, rhs = _on_tpu(tpu, dot, lhs, rhs, bias)
    if faster is None or not faster.kernels:
        source = then = None
    if bias is not None:
        then = None  # its gradient needs that of the result
    if source is not None:
        source = source_of_matrix(source, contracting, lhs.shape)
    if faster is not None and faster.shapes != ((m, k), (k, n)):
        then = None  # zeros are behind the values
    y, observed = multiply_quantized(operation, lhs, rhs, how, state, source, then)
    if isinstance(y, Followed):
        return y.reshape(shape), observed
    if faster is not None:
        y = y[:m, :n]
    y = y.reshape(shape)
    if bias is not None and isinstance(operation, DotOnTpu) and operation.bias is not None:
        return _with_bias_of_kernel(y, bias), observed
    return plus_bias(y, bias), observed


@jax.custom_vjp
def _with_bias_of_kernel(y: jax.Array, bias: jax.Array) -> jax.Array:
    """`y`, to which a kernel has added `bias`; with the gradient of ``y' + bias``."""
    del bias
    return y


def _bias_forward(y, bias):
    return y, bias


def _bias_backward(bias, dy):
    (d_bias,) = jax.vjp(lambda bias: plus_bias(jnp.zeros_like(dy), bias), bias)[1](dy)
    return dy, d_bias


_with_bias_of_kernel.defvjp(_bias_forward, _bias_backward)


def _matrices(
    lhs: jax.Array, rhs: Operand, numbers: Numbers, recipe: Recipe
) -> tuple[jax.Array, Operand, Numbers]:
    """`as_matrices`; of an `rhs` in bytes the values, unless `recipe` uses these very bytes."""
    quantizer = recipe.resolved().fprop.rhs
    if isinstance(rhs, ScaledArray) and quantizer is not None and quantizer.fmt == rhs.format:
        try:
            x, q, found = as_matrices(lhs, rhs, numbers)
        except ValueError:  # its blocks are not those of the matrix
            pass
        else:
            quantize = lambda x, quantizer, at: quantizer(x, at)
            if has_scales_of(quantizer, q, found[0][1], quantize):
                return x, q, found
    return as_matrices(lhs, values_of(rhs), numbers)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Dot(Operation):
    """``dot_general`` of operands with these shapes.

    Attributes:
      shapes, dtypes: see `Operation`.
      dimension_numbers: checked.
      implementation: see `scaled_matmul`.
    """

    dimension_numbers: Numbers
    implementation: Implementation

    def _product(self, kind: Kind) -> _DotProduct:
        return _three_products(self.shapes, self.dimension_numbers)[kind]

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._product(kind).numbers[0]

    def terms(self, kind: Kind) -> int:
        return self._product(kind).terms

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        numbers, order, _ = self._product(kind)
        y = multiply_operands(
            first, second, numbers, self.dtype_of(kind), sums, self.implementation
        )
        return y if order is None else y.transpose(order)


def multiply_operands(
    lhs: Operand,
    rhs: Operand,
    numbers: Numbers,
    dtype: np.dtype,
    sums: Sums,
    implementation: Implementation,
) -> jax.Array:
    """``dot_general`` of operands that may be quantized or not, in `dtype`."""
    if isinstance(lhs, ScaledArray) and isinstance(rhs, ScaledArray):
        return choice.product(lhs, rhs, Job(numbers, dtype, *sums), implementation)
    precision = None
    if isinstance(lhs, ScaledArray):
        lhs, precision = scaled_values(lhs), lax.Precision.HIGHEST
    if isinstance(rhs, ScaledArray):
        rhs, precision = scaled_values(rhs), lax.Precision.HIGHEST
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    return multiply(lhs.astype(common), rhs.astype(common), numbers, precision).astype(dtype)


class _DotProduct(NamedTuple):
    """One of the three products.

    Attributes:
      numbers: its dimension numbers.
      order: the transposition after it, if there is one.
      terms: the number of products that each element of the result sums.
    """

    numbers: Numbers
    order: tuple[int, ...] | None
    terms: int


@functools.lru_cache(maxsize=4096)
def _three_products(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> dict[Kind, _DotProduct]:
    """fprop, dgrad and wgrad.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    layout = layout_of(*shapes, numbers)
    m, n, k = layout.sizes
    lhs_free, rhs_free = layout.lhs_free, layout.rhs_free
    n_batch, n_lhs = len(lhs_batch), len(lhs_free)
    y_dims = tuple(range(len(layout.shape)))
    y_batch, y_lhs, y_rhs = y_dims[:n_batch], y_dims[n_batch:][:n_lhs], y_dims[n_batch + n_lhs :]

    # dgrad contracts what is free in rhs and gives: batch, lhs free, rhs contracting in rhs' order.
    # wgrad contracts what is free in lhs and gives: batch, lhs contracting in lhs' order, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    d_lhs_order = tuple(np.argsort(d_lhs_dims).tolist())
    d_rhs_order = tuple(np.argsort(d_rhs_dims).tolist())
    return {
        "fprop": _DotProduct(numbers, None, k),
        "dgrad": _DotProduct(((y_rhs, rhs_free), (y_batch, rhs_batch)), d_lhs_order, n),
        "wgrad": _DotProduct(((lhs_free, y_lhs), (lhs_batch, y_batch)), d_rhs_order, m),
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
        return super().multiply(kind, first, second, sums._replace(tpu=self.tpu, bias=bias))


def _on_tpu(
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


_BOTH_LAST = (((1,), (1,)), ((), ()))
TILE = 128  # of the kernels; other sizes are padded with zeros, once, before quantization


@jax.tree_util.register_static
@dataclass(frozen=True)
class ContractionLast(Operation):
    """``lhs[m, k] . rhs[k, n]`` and its gradients, for plain matrices with the contraction last. ::

        fprop  y [m, n] = q(lhs)  [m, k] . q(rhs)^T [n, k]
        dgrad  dx[m, k] = q(dy)   [m, n] . q(rhs)   [k, n]
        wgrad  dw[k, n] = q(lhs)^T[k, m] . q(dy)^T  [n, m]

    NVIDIA's tensor cores take 8-bit operands in this layout. Each tensor is needed both straight
    and transposed. The transposed bytes are made where the tensor is read to be quantized: later
    they would have to be read and written once more.

    Attributes:
      shapes, dtypes: see `Operation`.
      implementation: see `scaled_matmul`.
      kernels: whether Pallas kernels may quantize.
    """

    implementation: Implementation
    kernels: bool

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[kind]

    def terms(self, kind: Kind) -> int:
        (m, k), (_, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": m}[kind]

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array | CastLater | Made,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        del role
        if not self.kernels or second is None or first.quantizer != second.quantizer:
            return None
        if first.quantizer is None or not has_kernel(first.quantizer):
            return None
        along_rows = first.contracting == (1,)
        by_rows, by_columns = (first, second) if along_rows else (second, first)
        meets = by_rows.other_scale, by_columns.other_scale
        straight, other, largest = quantize_both_ways(first.quantizer, x, state, meets)
        return (straight, other, largest) if along_rows else (other, straight, largest)

    def laid_out(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        del role
        if contracting == (1,):
            return operand
        return operand.T

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        dtype = self.dtype_of(kind)
        return multiply_operands(first, second, _BOTH_LAST, dtype, sums, self.implementation)


def contraction_last(
    sizes: tuple[int, int, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    recipe: Recipe,
    implementation: Implementation,
) -> ContractionLast | None:
    """`ContractionLast` for ``(m, n, k)``, if the program is traced for a GPU where it is faster.

    Its matrices may be larger, with zeros behind the values.
    """
    products = recipe.resolved()
    if any(p.rotation for p in (products.fprop, products.dgrad, products.wgrad)):
        return None
    quantizers = products.quantizers()
    formats, blocks = {q.fmt for q in quantizers}, {q.block for q in quantizers if q.block}
    found = choice.contraction_last(sizes, formats, blocks, recipe.accumulation, implementation)
    if found is None:
        return None
    kernels = found == "kernels"
    m, n, k = (-(-size // TILE) * TILE for size in sizes) if kernels else sizes
    return ContractionLast(((m, k), (k, n)), dtypes, implementation, kernels)


def _plain_matrices(
    lhs: jax.Array,
    rhs: Operand,
    dimension_numbers: Numbers,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[jax.Array, Operand]:
    """The operands as ``[m, k]`` and ``[k, n]``, padded with zeros to `shapes`."""
    lhs, rhs, (((lhs_k,), (rhs_k,)), _) = as_matrices(lhs, rhs, dimension_numbers)
    lhs, rhs = (lhs.T if lhs_k == 0 else lhs), (rhs.T if rhs_k == 1 else rhs)
    return _grown(lhs, shapes[0]), _grown(rhs, shapes[1])


def _grown(x: Any, shape: tuple[int, ...]) -> Any:
    """`x` padded with zeros to `shape`."""
    if x.shape == shape or isinstance(x, ScaledArray):
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])
