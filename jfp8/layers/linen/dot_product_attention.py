"""Attention itself in FP8: between the projections of a Linen layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype

from jfp8.layers.attention import attend, check_weights_stay_inside
from jfp8.matmul.spec import Implementation
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
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """See `jfp8.scaled_dot_product_attention`; there may be any number of batch dimensions."""
        lengths = query_seq_lengths, key_value_seq_lengths
        return self.attend(
            *(query, key, value, bias, mask),
            scale=scale,
            is_causal=is_causal,
            local_window_size=local_window_size,
            tokens=(*lengths, query_segment_ids, key_value_segment_ids),
            sinks=sinks,
        )

    def attend(self, *arrays: jax.Array | None, **options: Any) -> jax.Array:
        """Compute `jfp8.layers.attention.attend` by the recipe in effect."""
        own = None if self.recipe is None else check_recipe(self.recipe)
        path = "/".join(self.path)
        recipe = recipe_in_effect(own, path)
        about = note("reason", why_in_high_precision())
        if recipe is not None:
            about = note("recipe", recipe.name)
        options |= {"recipe": recipe, "implementation": self.implementation}
        with note("path", path), about:
            return attend(*arrays, **options)  # pyrefly: ignore


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
