"""Attention itself in FP8: between the projections of a Linen layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype

from jfp8.layers.attention_math import attend_by, check_weights_stay_inside
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe


class DotProductAttention(nn.Module):
    """``jax.nn.dot_product_attention`` in FP8, forward and backward.

    See `jfp8.scaled_dot_product_attention`. It has no variables: its scales are per token,
    with any recipe. As a layer it has a path, by which recipes are chosen, and `jfp8.report` shows
    it.

    Attributes:
      recipe: see `Dense`.
      implementation: see `jfp8.scaled_dot_product_attention`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> q = jnp.ones((2, 5, 4, 16))
    >>> jfp8.linen.DotProductAttention().apply({}, q, q, q, is_causal=True).shape
    (2, 5, 4, 16)
    """

    recipe: RecipeLike | None = None
    implementation: str | None = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """Compute attention of arrays with any number of batch dimensions.

        Args:
          query, key, value, bias, mask: see `jfp8.scaled_dot_product_attention`.
          options: its others, but `recipe`, `state`, `sink` and `implementation`.
        """
        options["implementation"] = self.implementation
        return attend_by(*self._own(), query, key, value, bias, mask, **options)

    @nn.nowrap
    def _own(self) -> tuple[Recipe | None, str]:
        own = None if self.recipe is None else check_recipe(self.recipe)
        return own, "/".join(self.path)

    @nn.nowrap
    def _is_in_fp8(self) -> bool:
        return recipe_in_effect(*self._own()) is not None


def is_stock(attention_fn: Callable[..., jax.Array]) -> bool:
    """Return True if `attention_fn` of a layer is Flax's own."""
    return attention_fn is nn.dot_product_attention


def attention_fn_by(
    make: Callable[..., DotProductAttention], attention_fn: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return an ``attention_fn`` of Flax's, in FP8 by what `make` makes; else `attention_fn`."""

    def in_fp8(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> jax.Array:
        attention = make(name="attention")
        if not attention._is_in_fp8():
            return attention_fn(query, key, value, **given)
        rate = 0.0 if given.get("deterministic") else given.get("dropout_rate", 0.0)
        check_weights_stay_inside(rate, sown=given.get("module") is not None)
        query, key, value = promote_dtype(query, key, value, dtype=given.get("dtype"))
        return attention(query, key, value, given.get("bias"), given.get("mask"))

    # Flax passes the arguments that it finds in the signature.
    in_fp8.__signature__ = inspect.signature(attention_fn)  # pyrefly: ignore
    return in_fp8
