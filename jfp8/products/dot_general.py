"""`scaled_dot_general`: ``jax.lax.dot_general`` with quantized operands, forward and backward.

It is computed as the operation `Dot`, as `ContractionLast` on GPUs where that is faster, or as
`DotOnTpu`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels import choice
from jfp8.kernels.choice import Implementation
from jfp8.kernels.k_major import contraction_last, plain_matrices
from jfp8.kernels.tpu.dot import DotOnTpu, on_tpu
from jfp8.kernels.tpu.sharded import layout_of_matrices
from jfp8.matmul.spec import (
    Numbers,
    as_matrices,
    check_dimension_numbers,
    layout_of,
    plus_bias,
)
from jfp8.products.dot import Dot
from jfp8.products.explicit_sharding import (
    Specs,
    in_mesh_of_arguments,
    specs_of,
    with_result_like,
)
from jfp8.products.made import Followed, Source, Then, source_of_matrix
from jfp8.products.operation import (
    How,
    Observed,
    Operand,
    Operation,
    State,
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
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.context import has_explicit_axes, has_only_explicit_axes


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


@in_mesh_of_arguments
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
    specs: Specs | None = None,
) -> tuple[Any, Observed]:
    """`scaled_dot_general`, and the amaxes of its operands, which have no gradient.

    If the `source` of `lhs` is given, a kernel may make `lhs` itself. If it is known what follows
    `then`, whose projections are the last but one dimension of the result, this may be a
    `Followed`: then a kernel may make its gradient. A `bias` ``[n]`` is added to the result, by a
    kernel if that can. The `specs` say how `lhs`, `rhs` and the result are divided over devices.
    """
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    if has_explicit_axes():
        what: dict[str, Any] = {"dimension_numbers": dimension_numbers}
        result = {"preferred_element_type": preferred_element_type}
        reference = partial(lax.dot_general, **what, out_sharding=out_sharding)
        given = specs_of(reference, lhs, rhs)
        known = given if has_only_explicit_axes() else None
        function = partial(observed_dot_general, **what, how=how, **result, specs=known)
        multiply = lambda lhs, rhs, state, bias: function(lhs, rhs, state=state, bias=bias)
        return with_result_like(given, multiply, lhs, rhs, state, bias)
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    out_dtype = check_out_dtype(preferred_element_type, lhs, rhs, how)
    shape = layout_of(lhs.shape, rhs.shape, dimension_numbers).shape
    contracting = dimension_numbers[0][0]
    layout = None
    if specs is not None and not dimension_numbers[1][0]:
        layout = layout_of_matrices(specs, (lhs.shape, rhs.shape), dimension_numbers)
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
        lhs, rhs = plain_matrices(lhs, rhs, dimension_numbers, faster.shapes)
    elif not dimension_numbers[1][0]:
        tpu = choice.quantizing_tpu(lhs, how.implementation)
        if tpu is not None:
            early = None if how.recipe.resolved().fprop.output else bias  # y is rounded before
            operation, lhs, rhs = on_tpu(tpu, dot, lhs, rhs, early, layout)
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
