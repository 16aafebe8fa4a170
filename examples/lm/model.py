"""A small pre-norm Transformer: four FP8 matmuls per block, the rest in high precision by default.

`recipe=None` builds the same model from stock `flax.linen.Dense`. Both have the same parameter tree
and, for the same key, the same initial values, so the two can be trained side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jfp8

VOCABULARY = 256  # every byte is a token


def dense(x: jax.Array, features: int, recipe: Any, name: str) -> jax.Array:
    """Compute x @ kernel, in FP8 if there is a recipe.

    One matrix holds the positions of all sequences: on CPUs, XLA takes a quarter longer to train
    stock `nn.Dense` on a batch of matrices.
    """
    if recipe is None:
        layer = nn.Dense(features, use_bias=False, name=name)
    else:
        layer = jfp8.Dense(features, use_bias=False, recipe=recipe, name=name)
    return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], features)


def attention(
    x: jax.Array, heads: int, recipe: Any = None, attention_recipe: Any = None
) -> jax.Array:
    """Compute x + attention(norm(x)), the first half of a block, in its `nn.compact` method.

    qkv and out are FP8 matmuls if there is a `recipe`.
    """
    batch, length, width = x.shape
    qkv = dense(nn.LayerNorm(name="attention_norm")(x), 3 * width, recipe, "qkv")
    q, k, v = jnp.split(qkv.reshape(batch, length, heads, -1), 3, axis=-1)
    attend = jax.nn.dot_product_attention
    if attention_recipe is not None:
        attend = jfp8.linen.DotProductAttention(attention_recipe, name="attention")
    attended = attend(q, k, v, is_causal=True)
    return x + dense(attended.reshape(batch, length, width), width, recipe, "out")


class Block(nn.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); qkv, out, up and down in FP8.

    With `attention_recipe` attention itself is in FP8, too.
    """

    heads: int
    recipe: Any = None
    attention_recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = attention(x, self.heads, self.recipe, self.attention_recipe)
        hidden = dense(nn.LayerNorm(name="mlp_norm")(x), 4 * width, self.recipe, "up")
        return x + dense(nn.gelu(hidden), width, self.recipe, "down")


class Transformer(nn.Module):
    """Map int32[batch, length] bytes to f32[batch, length, 256] logits of the byte after each.

    With `scan_layers` the blocks are one module, looped over, and their parameters have a leading
    axis of layers. `gather` is applied to the parameters of each block when it runs, once in
    the forward and once in the backward pass: its result is not saved in between.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    max_length: int = 128
    recipe: Any = None
    head_recipe: Any = None
    attention_recipe: Any = None
    scan_layers: bool = False
    gather: Callable[[Any], Any] | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(VOCABULARY, self.width, name="embed")(tokens)
        x = x + nn.Embed(self.max_length, self.width, name="position")(positions)[None]
        block, how = self._block(), (self.heads, self.recipe, self.attention_recipe)
        if self.scan_layers:
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0, "fp8": 0, "fp8_sink": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scan(block(*how, name="blocks"), x, None)
        else:
            for i in range(self.layers):
                x = block(*how, name=f"block_{i}")(x)
        return dense(nn.LayerNorm(name="norm")(x), VOCABULARY, self.head_recipe, "head")

    def _block(self) -> type[Block]:
        if self.gather is None or self.is_initializing():
            return Block
        gathered = nn.map_variables(Block, "params", self.gather)
        keep = jax.checkpoint_policies.save_only_these_names("fp8_saved")
        return nn.remat(gathered, policy=keep, prevent_cse=not self.scan_layers)
