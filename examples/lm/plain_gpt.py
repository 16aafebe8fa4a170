"""A GPT written with Flax alone: nothing in this file knows about FP8.

Its blocks are one module, looped over by `nn.scan` and recomputed in the backward pass by
`nn.remat`; attention is Flax's; the logits are a matmul with the table of embeddings.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(hidden), None


class GPT(nn.Module):
    """Map int32[batch, length] tokens to f32[batch, length, vocabulary] logits of the next one."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    max_length: int = 128

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width)
        positions = nn.Embed(self.max_length, self.width)(jnp.arange(tokens.shape[1]))
        x = embed(tokens) + positions[None]
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = blocks(self.heads)(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))
