"""The Transformer of `model.py` in Flax NNX: its linear layers are from `jfp8.nnx`.

`recipe=None` builds the same model from stock `flax.nnx.Linear`. Both have the same parameters and,
for the same `rngs`, the same initial values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jfp8

from .model import VOCABULARY


def linear(inputs: int, outputs: int, recipe: Any, rngs: nnx.Rngs) -> nnx.Linear:
    if recipe is None:
        return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
    return jfp8.nnx.Linear(inputs, outputs, use_bias=False, recipe=recipe, rngs=rngs)


class Block(nnx.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); qkv, out, up and down in FP8."""

    def __init__(self, width: int, heads: int, recipe: Any, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = linear(width, 3 * width, recipe, rngs)
        self.out = linear(width, width, recipe, rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = linear(width, 4 * width, recipe, rngs)
        self.down = linear(4 * width, width, recipe, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, self.heads, -1)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Map int32[batch, length] bytes to f32[batch, length, 256] logits of the byte after each."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        max_length: int,
        recipe: Any = None,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Embed(max_length, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, heads, recipe, rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = linear(width, VOCABULARY, None, rngs)  # in high precision

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
