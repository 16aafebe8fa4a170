"""`scaled_dot_general`: ``jax.lax.dot_general`` with quantized operands, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import free_dims, multiply
from jfp8.arrays import ScaledArray, check_scale_shape, dequantize, scaled_values
from jfp8.bilinear import Kind, Observed, Operand, Operation, multiply_quantized
from jfp8.formats import as_float_array
from jfp8.matmul import (
    Implementation,
    check_dimension_numbers,
    check_implementation,
    scaled_matmul,
)
from jfp8.recipes import DelayedScaling, Product, Recipe, check_recipe
from jfp8.scaling import AmaxState


def scaled_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """``jax.lax.dot_general`` with FP8 operands, forward and backward.

    High precision in and out: operands and the incoming gradient are quantized as `recipe` says,
    multiplied with f32 accumulation, scaled in f32 and rounded once. The gradient is
    straight-through. NaN and Inf in an operand or gradient come out as NaN.

    Args:
      lhs, rhs: ``f32 | bf16 | f16`` arrays. `rhs` may be a `ScaledArray` instead: a weight that is
        only kept in FP8. It gets no gradient, and is used as it is where it has one scale and the
        format that `recipe` asks for; otherwise its values are quantized.
      dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: which quantizer each operand gets.
      state: amax histories of this product, ``{"lhs", "rhs", "grad"}`` as `Recipe.init_state` makes
        them; read, never written. None: current scaling.
      sink: ``f32[3, 2050]`` zeros (`jfp8.sink.init_sink`), whose cotangent carries the amaxes of
        lhs, rhs and grad out of the backward pass, for `advance`. With it (and `state`) gradients
        use their history; without it current scaling.
      key: random key for recipes that round stochastically. The bits are made from it and from the
        largest magnitude of the tensor that is rounded, so that one key serves all layers, steps,
        scan iterations and devices. None: from the data alone, which is reproducible, but rounds
        the same tensor in the same way every time.
      preferred_element_type: floating dtype of the result; default: that of the promoted operands.
      implementation: see `scaled_matmul`.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives.

    Raises:
      TypeError: operands that are not real floating arrays of at most 32 bits; no recipe.
      ValueError: dimension numbers or sizes that do not match; a `state` of another recipe; a
        `sink` of another shape; unknown `implementation`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 2.0)
    >>> loss = lambda w: jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    >>> jax.grad(loss)(w).shape
    (3, 4)
    """
    y, _ = observed_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        recipe=recipe,
        state=state,
        sink=sink,
        key=key,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    return y


def observed_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe,
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Observed]:
    """`scaled_dot_general`, and the amaxes it saw on the way; they have no gradient."""
    check_recipe(recipe)
    check_implementation(implementation)
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    out_dtype = check_out_dtype(preferred_element_type, lhs, rhs)
    out_shape = _out_shape(lhs.shape, rhs.shape, dimension_numbers)
    if recipe.products().matrices:
        rhs = frozen_values(rhs)
        lhs, rhs, dimension_numbers = _as_matrices(lhs, rhs, dimension_numbers)
    dot = Dot(
        dimension_numbers,
        (lhs.shape, rhs.shape),
        (np.dtype(lhs.dtype), value_dtype(rhs), out_dtype),
        implementation,
    )
    y, observed = multiply_quantized(dot, lhs, rhs, recipe=recipe, state=state, sink=sink, key=key)
    return y.reshape(out_shape), observed


def as_lhs(x: jax.typing.ArrayLike) -> jax.Array:
    """`x` as a floating array, or an error."""
    if isinstance(x, ScaledArray):
        raise TypeError(
            "lhs is a ScaledArray, but only rhs may be one: a weight that is kept in FP8. Pass "
            "lhs.dequantize(), or multiply two ScaledArrays with jfp8.scaled_matmul."
        )
    return as_float_array(x, "lhs")


def as_operand(x: jax.typing.ArrayLike | ScaledArray, what: str) -> Operand:
    """`x`, if it is a `ScaledArray` whose scale fits; else as a floating array, or an error."""
    if not isinstance(x, ScaledArray):
        return as_float_array(x, what)
    check_scale_shape(x)
    return x


def frozen_values(x: Operand) -> jax.Array:
    """`x` as an array: the values of a `ScaledArray`, which get no gradient."""
    return lax.stop_gradient(dequantize(x)) if isinstance(x, ScaledArray) else x


def value_dtype(x: Operand) -> np.dtype:
    """The dtype of the values of `x`."""
    return np.dtype(np.float32) if isinstance(x, ScaledArray) else np.dtype(x.dtype)


def check_out_dtype(
    preferred: jax.typing.DTypeLike | None, lhs: jax.Array, rhs: Operand
) -> np.dtype:
    """The dtype of a product: `preferred`, which must be floating, or that of the operands."""
    arrays = [x for x in (lhs, rhs) if not isinstance(x, ScaledArray)]
    out_dtype = preferred or jnp.result_type(*arrays)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {np.dtype(out_dtype)}."
        )
    return np.dtype(out_dtype)


@dataclass(frozen=True)
class Dot(Operation):
    """``dot_general`` of operands with these shapes.

    Attributes:
      dimension_numbers: checked.
      shapes: of lhs and rhs.
      dtypes: of lhs, rhs and y.
      implementation: see `scaled_matmul`.
    """

    dimension_numbers: lax.DotDimensionNumbers
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]
    implementation: Implementation

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers, _, _ = self._numbers(kind)
        first, second = numbers[0]
        return tuple(first), tuple(second)

    def terms(self, kind: Kind) -> int:
        lhs, rhs = self.shapes
        summed = {
            "fprop": [lhs[d] for d in self.contracting("fprop")[0]],
            "dgrad": [rhs[d] for d in self.contracting("dgrad")[1]],
            "wgrad": [lhs[d] for d in self.contracting("wgrad")[0]],
        }
        return math.prod(summed[kind])

    def multiply(
        self,
        kind: Kind,
        first: Operand,
        second: Operand,
        how: Product,
        accumulation: str,
        extra: tuple[jax.Array, ...],
    ) -> jax.Array:
        del extra
        numbers, order, dtype = self._numbers(kind)
        y = self._product(first, second, numbers, dtype, how, accumulation)
        return y if order is None else y.transpose(order)

    def _numbers(
        self, kind: Kind
    ) -> tuple[lax.DotDimensionNumbers, tuple[int, ...] | None, np.dtype]:
        """Dimension numbers, the transposition that follows, and the dtype of one product."""
        lhs_dtype, rhs_dtype, y_dtype = self.dtypes
        if kind == "fprop":
            return self.dimension_numbers, None, y_dtype
        dgrad, d_lhs, wgrad, d_rhs = _transposed_products(
            len(self.shapes[0]), len(self.shapes[1]), self.dimension_numbers
        )
        return (dgrad, d_lhs, lhs_dtype) if kind == "dgrad" else (wgrad, d_rhs, rhs_dtype)

    def _product(
        self,
        lhs: Operand,
        rhs: Operand,
        dimension_numbers: lax.DotDimensionNumbers,
        dtype: np.dtype,
        how: Product,
        accumulation: str,
    ) -> jax.Array:
        if isinstance(lhs, ScaledArray) and isinstance(rhs, ScaledArray):
            return scaled_matmul(
                lhs,
                rhs,
                dimension_numbers,
                preferred_element_type=dtype,
                accumulation=accumulation,
                fast_accumulation=how.fast_accumulation,
                implementation=self.implementation,
            )
        precision = None
        if isinstance(lhs, ScaledArray):
            lhs, precision = scaled_values(lhs), lax.Precision.HIGHEST
        if isinstance(rhs, ScaledArray):
            rhs, precision = scaled_values(rhs), lax.Precision.HIGHEST
        common = jnp.promote_types(lhs.dtype, rhs.dtype)
        y = multiply(lhs.astype(common), rhs.astype(common), dimension_numbers, precision)
        return y.astype(dtype)


def _out_shape(
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    dimension_numbers: lax.DotDimensionNumbers,
) -> tuple[int, ...]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = free_dims(len(lhs_shape), lhs_contract, lhs_batch)
    rhs_free = free_dims(len(rhs_shape), rhs_contract, rhs_batch)
    batch = tuple(lhs_shape[d] for d in lhs_batch)
    return (*batch, *(lhs_shape[d] for d in lhs_free), *(rhs_shape[d] for d in rhs_free))


def _as_matrices(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[jax.Array, jax.Array, lax.DotDimensionNumbers]:
    """Operands with one batch dimension at most, one free and one contracting dimension.

    Blocks of scales run over the rows and columns of the matrices that are multiplied, across the
    borders of the dimensions that make them up.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = free_dims(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs.ndim, rhs_contract, rhs_batch)
    lhs, lhs_k = _grouped(lhs, lhs_batch, lhs_free, lhs_contract)
    rhs, rhs_k = _grouped(rhs, rhs_batch, rhs_free, rhs_contract)
    batch = ((0,), (0,)) if lhs_batch else ((), ())
    return lhs, rhs, (((lhs_k,), (rhs_k,)), batch)


def _grouped(
    x: jax.Array, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]
) -> tuple[jax.Array, int]:
    """`x` with each of three groups of dimensions merged into one, and where `contract` went.

    The batch dimension comes first, or is missing if there is none; the other two are left in the
    order that they have, and made if they are missing. Nothing is transposed unless a group is not
    in order or not in one piece.
    """
    matrix = sorted((tuple(free), tuple(contract)))
    groups = [tuple(batch), *matrix] if batch else matrix
    order = [d for group in groups for d in group]
    x = x if order == sorted(order) else x.transpose(order)
    sizes = iter(x.shape)
    x = x.reshape([math.prod(next(sizes) for _ in group) for group in groups])
    return x, len(groups) - 1 if groups[-1] == tuple(contract) else len(groups) - 2


def _transposed_products(
    lhs_ndim: int, rhs_ndim: int, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[Any, tuple[int, ...], Any, tuple[int, ...]]:
    """Dimension numbers of dgrad and wgrad, each with the transposition that follows it.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(map(tuple, pair)) for pair in dimension_numbers
    )
    lhs_free = free_dims(lhs_ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs_ndim, rhs_contract, rhs_batch)
    n_batch, n_lhs, n_rhs = len(lhs_batch), len(lhs_free), len(rhs_free)
    y_batch = tuple(range(n_batch))
    y_lhs = tuple(range(n_batch, n_batch + n_lhs))
    y_rhs = tuple(range(n_batch + n_lhs, n_batch + n_lhs + n_rhs))

    # dgrad contracts what is free in rhs and gives: batch, lhs free, rhs contracting in rhs' order.
    # wgrad contracts what is free in lhs and gives: batch, lhs contracting in lhs' order, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    return (
        ((y_rhs, rhs_free), (y_batch, rhs_batch)),
        tuple(np.argsort(d_lhs_dims).tolist()),
        ((lhs_free, y_lhs), (lhs_batch, y_batch)),
        tuple(np.argsort(d_rhs_dims).tolist()),
    )
