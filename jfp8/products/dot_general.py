"""`scaled_dot_general`: ``jax.lax.dot_general`` with quantized operands, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.choice import Implementation
from jfp8.matmul.dimensions import Numbers, as_matrices, check_dimension_numbers, layout_of
from jfp8.products.contraction_last import contraction_last
from jfp8.products.dot import Dot
from jfp8.products.explicit_sharding import has_explicit_axes, with_result_like
from jfp8.products.operation import How, Observed, Operand, Operation, State
from jfp8.products.vjp import multiply_quantized
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.arrays import ScaledArray, check_scale_shape, dequantize
from jfp8.scaling.casts import as_float_array
from jfp8.scaling.history import AmaxState


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
      sink: ``f32[3, 2050]`` zeros (`jfp8.scaling.init_sink`), whose cotangent carries the amaxes of
        lhs, rhs and grad out of the backward pass, for `advance`. With it (and `state`) gradients
        use their history; without it current scaling.
      key: random key for recipes that round stochastically. The bits are made from it and from the
        largest magnitude of the tensor that is rounded, so that one key serves all layers, steps,
        scan iterations and devices. None: from the data alone, which is reproducible, but rounds
        the same tensor in the same way every time.
      preferred_element_type: floating dtype of the result; default: that of the promoted operands.
      implementation: see `scaled_matmul`.
      out_sharding: of the result, as for ``jax.lax.dot_general``: for meshes with explicit axes.

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
) -> tuple[jax.Array, Observed]:
    """`scaled_dot_general`, and the amaxes it saw on the way; they have no gradient."""
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    if has_explicit_axes():
        what: dict[str, Any] = {"dimension_numbers": dimension_numbers}
        result = {"preferred_element_type": preferred_element_type}
        reference = partial(lax.dot_general, **what, out_sharding=out_sharding)
        function = partial(observed_dot_general, **what, how=how, **result)
        return with_result_like(reference, function, lhs, rhs, state)
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    out_dtype = check_out_dtype(preferred_element_type, lhs, rhs)
    shape = layout_of(lhs.shape, rhs.shape, dimension_numbers).shape
    if how.recipe.resolved().matrices:
        # Blocks of scales run over the rows and columns of the matrices that are multiplied, across
        # the borders of the dimensions that make them up.
        rhs = values_of(rhs)
        lhs, rhs, dimension_numbers = as_matrices(lhs, rhs, dimension_numbers)
    dtypes = (np.dtype(lhs.dtype), value_dtype(rhs), out_dtype)
    operation: Operation = Dot(
        (lhs.shape, rhs.shape), dtypes, dimension_numbers, how.implementation
    )
    m, n, k = layout_of(lhs.shape, rhs.shape, dimension_numbers).sizes
    faster = None
    if not dimension_numbers[1][0] and not isinstance(rhs, ScaledArray):
        faster = contraction_last((m, n, k), dtypes, how.recipe, how.implementation)
    if faster is not None:
        assert not isinstance(rhs, ScaledArray)
        operation = faster
        lhs, rhs = _plain_matrices(lhs, rhs, dimension_numbers, faster.shapes)
    y, observed = multiply_quantized(operation, lhs, rhs, how.recipe, state)
    if faster is not None:
        y = y[:m, :n]
    return y.reshape(shape), observed


def _plain_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Numbers,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[jax.Array, jax.Array]:
    """The operands as ``[m, k]`` and ``[k, n]``, with zeros up to these `shapes`."""
    lhs, rhs, (((lhs_k,), (rhs_k,)), _) = as_matrices(lhs, rhs, dimension_numbers)
    lhs, rhs = (lhs.T if lhs_k == 0 else lhs), (rhs.T if rhs_k == 1 else rhs)
    return _grown(lhs, shapes[0]), _grown(rhs, shapes[1])


def _grown(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with zeros behind it, in this `shape`."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])


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


def values_of(x: Operand) -> jax.Array:
    """`x` as an array: the values of a `ScaledArray`, whose bytes get no gradient."""
    if not isinstance(x, ScaledArray):
        return x
    return dequantize(replace(x, data=lax.stop_gradient(x.data)))


def value_dtype(x: Operand) -> np.dtype:
    """The dtype of the gradient by the values of `x`."""
    if not isinstance(x, ScaledArray):
        return np.dtype(x.dtype)
    return np.dtype(np.float32) if x.carrier is None else np.dtype(x.carrier.dtype)


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
