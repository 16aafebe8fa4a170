"""Attention as layers call it: any batch dimensions, Flax's masks, and the limits of FP8."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.layers.options import check_operand
from jfp8.products.flash.dot_product import OF_TOKENS, AttentionOptions, attention
from jfp8.recipes.in_effect import recipe_in_effect, why_in_high_precision
from jfp8.recipes.per_layer import PerLayer
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.notes import note


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    tokens: tuple[jax.Array | None, ...] = (None,) * 4,
    sinks: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Compute `scaled_dot_product_attention`, whose scales come from the tokens, with any recipe.

    Args:
      bias, mask: broadcast to ``[..., heads, queries, keys]``; the mask may be of numbers.
      tokens, dropout_key: see `jfp8.products.flash.dot_product.attention`.
      options: see `AttentionOptions`.
    """
    for x in (query, key, value):
        check_operand(x)
    shape, batch = query.shape, query.shape[:-3]
    mask = None if mask is None else jnp.asarray(mask, bool)
    if len(batch) > 1:
        bias, mask = _by_score(bias, batch), _by_score(mask, batch)
        each = lambda x: x.reshape(-1, *x.shape[len(batch) :])
        query, key, value, tokens = jax.tree.map(each, (query, key, value, tokens))
    arrays = query, key, value, bias, mask, sinks
    y = attention(AttentionOptions(**options), arrays, tokens, dropout_key=dropout_key)
    return y.reshape(shape)


def attend_by(own: Recipe | PerLayer | None, path: str, *arrays: Any, **options: Any) -> jax.Array:
    """Compute `attend` by the recipe in effect for a layer at `path`, whose `own` one this is."""
    recipe = recipe_in_effect(own, path)
    about = note("recipe", recipe.name) if recipe else note("reason", why_in_high_precision())
    if "tokens" not in options:
        options["tokens"] = tuple(options.pop(name, None) for name in OF_TOKENS)
    with note("path", path), about:
        return attend(*arrays, recipe=recipe, **options)


def _by_score(x: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    own = x.shape[len(batch) :]
    if math.prod(x.shape[: len(batch)]) == 1:
        return x.reshape(1, *own)
    return jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)


def check_weights_stay_inside(dropout_rate: float, sown: bool) -> None:
    """Raise ``ValueError`` if a call drops or stores weights, of which FP8 attention has none."""
    wanted = f"dropout_rate={dropout_rate}" if dropout_rate else "sow_weights=True" if sown else ""
    if wanted:
        raise ValueError(
            f"Attention in FP8 cannot do what {wanted} asks for: it makes its weights block by "
            "block and keeps none, so that none can be dropped or stored. Leave that out (of "
            "dropout: rate 0 for attention's weights, or deterministic=True), or keep this "
            "attention in high precision: attention_products=False of the layer, or its path in "
            "exempt= of jfp8.convert."
        )
