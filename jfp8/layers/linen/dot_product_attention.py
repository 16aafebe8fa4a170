"""Attention itself in FP8: between the projections of a Linen layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype

from jfp8.layers.attention import attend, check_weights_stay_inside, plain_attention
from jfp8.matmul.spec import Implementation
from jfp8.products.flash.dot_product import SEPARATE, Projections
from jfp8.recipes.in_effect import recipe_in_effect, why_in_high_precision
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.tracing.notes import note


class DotProductAttention(nn.Module):
    """``jax.nn.dot_product_attention`` in FP8, forward and backward.

    See `jfp8.scaled_dot_product_attention`. It has no variables: its scales are those of tokens,
    with any recipe. As a layer it has a path, by which recipes are chosen, and `jfp8.report` shows
    it.

    Attributes:
      recipe: see `Dense`.
      implementation: ``"emulate"``: the reference on any device. Others are for products, and do
        nothing here.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> q = jnp.ones((2, 5, 4, 16))
    >>> jfp8.linen.DotProductAttention().apply({}, q, q, q, is_causal=True).shape
    (2, 5, 4, 16)
    """

    recipe: RecipeLike | None = None
    implementation: Implementation = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        local_window_size: int | tuple[int, int] | None = None,
    ) -> jax.Array:
        """See `jfp8.scaled_dot_product_attention`; there may be any number of batch dimensions."""
        return self._attend(
            (query, key, value, bias, mask),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
        )

    def of_projected(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        *,
        is_causal: bool,
        projections: Projections,
    ) -> jax.Array:
        """Compute attention of slices of projections.

        Args:
          query, key, value, bias, mask, is_causal: see `jfp8.scaled_dot_product_attention`.
          projections: see `jfp8.products.flash.dot_product.attention_of_projections`.
        """
        return self._attend((query, key, value, bias, mask), projections, is_causal=is_causal)

    @nn.nowrap
    def _attend(
        self, arrays: tuple[Any, ...], projections: Projections = SEPARATE, **options: Any
    ) -> jax.Array:
        own = None if self.recipe is None else check_recipe(self.recipe)
        path = "/".join(self.path)
        recipe = recipe_in_effect(own, path)
        if recipe is None:
            with note("reason", why_in_high_precision()):
                return plain_attention(*arrays, **options)
        with note("path", path), note("recipe", recipe.name):
            return attend(
                *arrays,
                recipe=recipe,
                implementation=self.implementation,
                projections=projections,
                **options,
            )


def is_stock(attention_fn: Callable[..., jax.Array]) -> bool:
    """Return True if `attention_fn` of a layer is Flax's own."""
    return attention_fn is nn.dot_product_attention


def attention_fn_by(
    make: Callable[..., DotProductAttention], attention_fn: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return an ``attention_fn`` for a layer of Flax, in FP8 by what `make` makes.

    Args:
      attention_fn: the layer's own, for regions in which FP8 is disabled.
    """

    def in_fp8(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> jax.Array:
        attention = make(name="attention")
        own = None if attention.recipe is None else check_recipe(attention.recipe)
        if recipe_in_effect(own, "/".join(attention.path)) is None:
            return attention_fn(query, key, value, **given)
        rate = 0.0 if given.get("deterministic") else given.get("dropout_rate", 0.0)
        check_weights_stay_inside(rate, sown=given.get("module") is not None)
        query, key, value = promote_dtype(query, key, value, dtype=given.get("dtype"))
        return attention(query, key, value, given.get("bias"), given.get("mask"))

    # Flax passes the arguments that it finds in the signature.
    in_fp8.__signature__ = inspect.signature(attention_fn)  # pyrefly: ignore
    return in_fp8
