"""`scaled_dot_general`: ``jax.lax.dot_general`` with quantized operands, forward and backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.as_matrices import as_matrices
from jfp8.matmul.planner import allowed_planner, multiply
from jfp8.matmul.spec import Implementation, MatmulSpec, Numbers, as_numbers, layout_of
from jfp8.products.bias import plus_bias, with_gradient_of_sum
from jfp8.products.explicit_sharding import Specs, specs_of, with_result_like
from jfp8.products.operation import (
    Kind,
    Observed,
    Operand,
    Operation,
    Options,
    State,
    as_operands,
    dtypes_of,
    in_mesh_of_arguments,
)
from jfp8.products.quantized_rhs import rhs_of_matrices
from jfp8.products.vjp import Planned, multiply_quantized
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.device import explicit_mesh


def scaled_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: RecipeLike = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Compute ``jax.lax.dot_general`` with FP8 operands, forward and backward. ::

        fprop  y    = q(lhs) . q(rhs)
        dgrad  dlhs = q(dy) . q(rhs)^T
        wgrad  drhs = q(lhs)^T . q(dy)

    Operands and results are in high precision: `recipe` defines ``q`` for each operand of each
    matmul. Sums are accumulated and scaled in f32, and rounded once. The gradient is
    straight-through. A NaN or Inf in an operand or gradient gives NaN in the result.

    Args:
      lhs, rhs: ``f32 | bf16 | f16`` arrays. `rhs` may be a `ScaledArray` instead: a weight that is
        only stored in FP8. It has no gradient, unless it has a `ScaledArray.carrier`. Its bytes are
        used unchanged if they have the format and the scales that `recipe` requires: one scale, or
        one for each row or block of this matmul. Otherwise its values are quantized.
      dimension_numbers: see ``jax.lax.dot_general``.
      recipe: how each operand of each product is quantized; an object or its name.
      state: amax histories of this matmul, ``{"lhs", "rhs", "grad"}`` from `Recipe.init_state`;
        they are read, never written. Without a state, all scales are current; where no
        gradient is taken, the scale of `rhs`, a weight, is current in any case.
      sink: ``f32[3, 2050]`` zeros (`jfp8.scaling.init_sink`), whose cotangent carries the amaxes of
        lhs, rhs and grad out of the backward pass, for `advance`. With both `sink` and `state`,
        gradients use their history; without a sink, current scaling.
      key: random key for recipes that round stochastically. It is combined with the amax of the
        rounded tensor, so that one key serves all layers, steps, scan iterations and devices.
        Without a key, the bits depend on the data alone, which is reproducible,
        but rounds the same tensor in the same way every time.
      preferred_element_type: floating dtype of the result; by default from promoted operands.
      implementation: see `scaled_matmul`.
      out_sharding: sharding of the result, as for ``jax.lax.dot_general``, on meshes with explicit
        axes.

    Returns:
      Array of the same shape as the result of ``jax.lax.dot_general``.

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
    recipe = recipe if isinstance(recipe, Recipe) else check_recipe(recipe)
    y, _ = observed_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        Options(recipe, implementation),
        State(state, sink, key),
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return y


@dataclass(frozen=True)
class DotSpec:
    """The static description of a `scaled_dot_general`, from which it is planned."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # lhs and rhs
    dtypes: tuple[np.dtype, np.dtype, np.dtype]  # lhs, rhs and y
    dimension_numbers: Numbers  # validated
    options: Options  # including the device
    has_quantized_rhs: bool = False
    # If known, those of lhs, rhs and y, and the shapes and dimension numbers to which they refer.
    sharding: tuple[Specs, tuple[tuple[int, ...], tuple[int, ...]], Numbers] | None = None

    def reference(self) -> Dot:
        """Return the reference operation."""
        return Dot(self.shapes, self.dtypes, self.dimension_numbers)


@in_mesh_of_arguments
def observed_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    options: Options,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
    bias: jax.Array | None = None,
    specs: Specs | None = None,
) -> tuple[jax.Array, Observed]:
    """Compute `scaled_dot_general`, and return the amaxes of its operands without gradients.

    A `bias` ``[n]`` is added to the result, in the kernel if it supports that. For `specs` see
    `planned_dot_general`.
    """
    lhs, rhs = as_operands(lhs, rhs)
    what: dict[str, Any] = {"dimension_numbers": dimension_numbers}
    how = what | {"options": options, "preferred_element_type": preferred_element_type}
    if explicit_mesh() is not None:
        given = specs_of(partial(lax.dot_general, **what, out_sharding=out_sharding), lhs, rhs)
        function = partial(observed_dot_general, **how, specs=given if given.are_complete else None)
        inside = lambda lhs, rhs, state, bias: function(lhs, rhs, state=state, bias=bias)
        return with_result_like(given.y, inside, lhs, rhs, state, bias)
    planned = planned_dot_general(lhs, rhs, state=state, specs=specs, **how)
    if bias is not None:
        biased = planned.operation.with_bias(lax.stop_gradient(bias), planned.options)
        if biased is not None:
            y, observed = multiply_quantized(planned._replace(operation=biased))
            return with_gradient_of_sum(y, bias), observed
    y, observed = multiply_quantized(planned)
    return (y if bias is None else plus_bias(y, bias)), observed


def planned_dot_general(
    lhs: jax.Array,
    rhs: Operand,
    dimension_numbers: lax.DotDimensionNumbers,
    options: Options,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    specs: Specs | None = None,
) -> Planned:
    """Decide how a `scaled_dot_general` of `as_operands` is computed.

    The `specs` are the shardings of `lhs`, `rhs` and the result on meshes with explicit axes.
    """
    numbers = as_numbers(dimension_numbers)
    *_, out_dtype = dtypes_of(lhs, rhs, options, preferred_element_type)
    shapes = lhs.shape, rhs.shape
    shape = layout_of(*shapes, numbers).shape
    sharding = None if specs is None else (specs, shapes, numbers)
    if options.recipe.resolved().matrices:
        # Blocks of scales run over the rows and columns of the multiplied matrices, across
        # the borders of the dimensions that form them.
        rhs = rhs_of_matrices(rhs, numbers, options.recipe)
        lhs, rhs, numbers = as_matrices(lhs, rhs, numbers)
    quantized, dtypes = isinstance(rhs, ScaledArray), dtypes_of(lhs, rhs, options, out_dtype)
    here = options.on_device_of(lhs, rhs)
    spec = DotSpec((lhs.shape, rhs.shape), dtypes, numbers, here, quantized, sharding)
    operation = allowed_planner(here.device, options.implementation).plan(spec)
    return Planned(operation, lhs, rhs, here, state, partial(jnp.reshape, shape=shape))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Dot(Operation):
    """The reference implementation of ``dot_general``."""

    dimension_numbers: Numbers

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return three_matmuls(self.shapes, self.dimension_numbers)[kind].numbers[0]

    def terms(self, kind: Kind) -> int:
        return three_matmuls(self.shapes, self.dimension_numbers)[kind].terms

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        numbers, order, _ = three_matmuls(self.shapes, self.dimension_numbers)[kind]
        spec = replace(spec, dimension_numbers=numbers, dtype=self.dtype_of(kind))
        y = multiply(first, second, spec)
        return y if order is None else y.transpose(order)


class _Matmul(NamedTuple):
    """One of the three matmuls."""

    numbers: Numbers
    order: tuple[int, ...] | None  # transposition of the result
    terms: int  # in the sum of each element


@functools.lru_cache(maxsize=4096)
def three_matmuls(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> dict[Kind, _Matmul]:
    """Return fprop, dgrad and wgrad.

    The output ``y`` has the batch dimensions first, then the free ones of lhs, then of rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    layout = layout_of(*shapes, numbers)
    m, n, k = layout.sizes
    lhs_free, rhs_free = layout.lhs_free, layout.rhs_free
    n_batch, n_lhs = len(lhs_batch), len(lhs_free)
    y_dims = tuple(range(len(layout.shape)))
    y_batch, y_lhs, y_rhs = y_dims[:n_batch], y_dims[n_batch:][:n_lhs], y_dims[n_batch + n_lhs :]

    # dgrad contracts the free dimensions of rhs; its result: batch, lhs free, rhs contracting.
    # wgrad contracts the free dimensions of lhs; its result: batch, lhs contracting, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    d_lhs_order = tuple(np.argsort(d_lhs_dims).tolist())
    d_rhs_order = tuple(np.argsort(d_rhs_dims).tolist())
    return {
        "fprop": _Matmul(numbers, None, k),
        "dgrad": _Matmul(((y_rhs, rhs_free), (y_batch, rhs_batch)), d_lhs_order, n),
        "wgrad": _Matmul(((lhs_free, y_lhs), (lhs_batch, y_batch)), d_rhs_order, m),
    }
