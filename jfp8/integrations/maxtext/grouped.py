"""MaxText's grouped matmul of tokens with experts, in FP8."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe


def multiplying(gmm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make ``megablox.gmm`` multiply by `scaled_ragged_dot` if its dtype is a recipe.

    MaxText calls it inside a ``shard_map``, where no state is within reach: each device scales
    operands by their own amaxes.
    """

    @wraps(gmm)
    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        preferred_element_type: Any = None,
        *args: Any,
        lhs_quantize_dtype: Any = None,
        **more: Any,
    ) -> jax.Array:
        if not isinstance(lhs_quantize_dtype, Recipe):
            more |= {"lhs_quantize_dtype": lhs_quantize_dtype}
            return gmm(lhs, rhs, group_sizes, preferred_element_type, *args, **more)
        recipe = recipe_in_effect(lhs_quantize_dtype, "")
        if recipe is None:
            more |= {"rhs_quantize_dtype": None}
            return gmm(lhs, rhs, group_sizes, preferred_element_type, *args, **more)
        _check(more)
        y = scaled_ragged_dot(
            lhs, rhs, group_sizes, recipe=recipe, preferred_element_type=preferred_element_type
        )
        partial_sum = more.get("partial_sum")
        return y if partial_sum is None else y + partial_sum

    return multiply


def _check(more: dict[str, Any]) -> None:
    """Refuse what would compute something else."""
    offset = more.get("group_offset")
    elsewhere = offset is not None and not (isinstance(offset, int) and offset == 0)
    if elsewhere or more.get("weight_gather_axes") or more.get("transpose_rhs"):
        raise NotImplementedError(
            "The grouped matmul of jfp8 supports no group offset, gathered weights or "
            "transposed weights. Set use_ring_of_experts=False and shard_exp_on_fsdp=False, or "
            "sparse_matmul=False."
        )
