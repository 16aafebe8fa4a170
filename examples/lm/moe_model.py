"""The Transformer of `model.py` with a mixture of experts instead of every block's MLP.

`recipe=None` is the same model in float32: stock `nn.Dense`, and experts in a region without FP8.
Both have the same parameter tree and, for the same key, the same initial values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jfp8

from .model import VOCABULARY, attention, dense


class MoEBlock(nn.Module):
    """Compute x + attention(norm(x)), then x + experts(norm(x)); all but the router in FP8."""

    heads: int
    experts: int
    experts_per_token: int
    intermediate: int
    recipe: Any = None
    expert_axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = attention(x, self.heads, self.recipe)
        # The mesh axis over which experts are sharded; without it they are on every device.
        axis = {} if self.expert_axis is None else {"expert_axis": self.expert_axis}
        moe = jfp8.linen.MoE(
            self.experts,
            self.intermediate,
            self.experts_per_token,
            recipe=self.recipe,
            name="moe",
            **axis,
        )
        # Layers of jfp8 without a recipe would use the default one.
        in_float32 = self.recipe is None
        with jfp8.autocast(enabled=False) if in_float32 else contextlib.nullcontext():
            return x + moe(nn.LayerNorm(name="moe_norm")(x))


class MoETransformer(nn.Module):
    """Map int32[batch, length] bytes to f32[batch, length, 256] logits of the byte after each.

    `apply_and_watch` also returns the experts of every block's tokens.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    max_length: int = 128
    experts: int = 8
    experts_per_token: int = 2
    intermediate: int = 256
    recipe: Any = None
    expert_axis: str | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(VOCABULARY, self.width, name="embed")(tokens)
        x = x + nn.Embed(self.max_length, self.width, name="position")(positions)[None]
        sizes = (self.heads, self.experts, self.experts_per_token, self.intermediate)
        for i in range(self.layers):
            x = MoEBlock(*sizes, self.recipe, self.expert_axis, name=f"block_{i}")(x)
        return dense(nn.LayerNorm(name="norm")(x), VOCABULARY, None, "head")


class Experts(NamedTuple):
    """The decisions of the routers for one batch.

    Attributes:
      tokens: i32[layers, experts], number of tokens of each expert of each layer.
      balance: f32[layers], the load-balancing losses: 1 if all experts get equal shares.
    """

    tokens: jax.Array
    balance: jax.Array


def apply_and_watch(apply: Callable[..., Any], variables: Any, tokens: jax.Array) -> Any:
    """Return ``(logits, Experts)`` of `MoETransformer.apply`."""
    is_router = lambda module, method: module.name == "router" and method == "__call__"
    logits, kept = apply(
        variables, tokens, mutable=["intermediates"], capture_intermediates=is_router
    )
    blocks = kept["intermediates"]
    layers = [blocks[f"block_{i}"]["moe"] for i in range(len(blocks))]
    (routed,) = zip(*(layer["router"]["__call__"] for layer in layers), strict=True)
    (balance,) = zip(*(layer["load_balancing_loss"] for layer in layers), strict=True)
    return logits, Experts(jnp.stack([r.group_sizes for r in routed]), jnp.stack(balance))
