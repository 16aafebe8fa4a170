"""The two products of attention under a recipe: see `recipes.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.job import check_dimension_numbers
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import (
    How,
    Observed,
    Operand,
    State,
    as_lhs,
    as_operand,
    check_out_dtype,
    values_of,
)
from jfp8.recipes.attention import InAttention, attention_products
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import PerAxis, amax, scale_from_amax


def observed_in_attention(
    which: InAttention | None,
) -> Callable[..., tuple[jax.Array, Observed]]:
    """`observed_dot_general` for one of the two products of attention; None: for any other.

    It uses the recipe that `recipes.attention.attention_products` makes. The scale of each key's
    values moves into the weights before these are quantized::

        sum_k p_k v_k  =  sum_k (p_k s_k) (v_k / s_k)          s_k a power of two: exact
    """
    if which is None:
        return observed_dot_general
    return functools.partial(_observed, which)


def _observed(
    which: InAttention,
    lhs: jax.typing.ArrayLike,
    rhs: Any,
    dimension_numbers: lax.DotDimensionNumbers,
    how: How,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    **options: Any,
) -> tuple[jax.Array, Observed]:
    recipe, of_values = _recipe_for(how.recipe, which)
    how = replace(how, recipe=recipe)
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    dtype = check_out_dtype(preferred_element_type, lhs, rhs, how)
    if of_values is not None:
        lhs, rhs = _with_scales_in_lhs(lhs, rhs, dimension_numbers, of_values)
    return observed_dot_general(
        lhs, rhs, dimension_numbers, how, state, preferred_element_type=dtype, **options
    )


@functools.cache
def _recipe_for(recipe: Recipe, which: InAttention) -> tuple[Recipe, Format | None]:
    own = recipe.resolved()
    products, of_values = attention_products(own, which)
    if products == own:
        return recipe, of_values
    return PerOperand(**vars(products), accumulation=recipe.accumulation), of_values


def _with_scales_in_lhs(
    lhs: jax.Array, rhs: Operand, dimension_numbers: lax.DotDimensionNumbers, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    """``lhs * s`` and ``rhs / s``, f32, with ``s`` one power of two for each summed index of `rhs`.

    ``|rhs / s| <= fmt.max``, and over half of that, for each index.
    """
    lhs, rhs = lhs.astype(jnp.float32), values_of(rhs).astype(jnp.float32)
    numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    lhs_kept, rhs_kept = (batch + sums for sums, batch in zip(*numbers, strict=True))
    largest = amax(lax.stop_gradient(rhs), PerAxis(rhs_kept))
    scale = scale_from_amax(largest, fmt, scale_rounding="power_of_two")
    free = [d for d in range(rhs.ndim) if d not in rhs_kept]
    # The dimensions that both operands have, in the order of lhs, among ones.
    in_order = [rhs_kept[i] for i in sorted(range(len(lhs_kept)), key=lambda i: lhs_kept[i])]
    of_lhs = scale.transpose(*in_order, *free).reshape(
        [n if d in lhs_kept else 1 for d, n in enumerate(lhs.shape)]
    )
    return lhs * of_lhs, rhs / scale
