"""A current language model in plain Flax NNX: nothing in this file knows about FP8.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; parameters in float32, activations in
bfloat16. `nnx.vmap` stacks the layers and `nnx.scan` runs them, so that twenty compile as fast as
one. `jfp8.convert(model)` converts the four linear layers of each to FP8, and leaves `head` as is.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .fsdp_nnx import by_sequence

BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    key_heads: int  # heads of keys and values: several heads of queries share one
    mlp: int
    seq_len: int
    vocabulary: int

    @property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """Return inputs and outputs of qkv, out, gate_up and down."""
        keys = self.key_heads * self.width // self.heads
        qkv, out = (self.width, self.width + 2 * keys), (self.width, self.width)
        return qkv, out, (self.width, 2 * self.mlp), (self.mlp, self.width)


# With other defaults of the command line.
SIZES = {
    "tiny": (Size(128, 4, 4, 2, 384, 128, 256), {"batch_size": 16}),
    "100m": (Size(768, 12, 12, 4, 2048, 1024, 32_768), {"batch_size": 64, "lr": 1e-3}),
    "1b": (Size(2048, 20, 16, 4, 6144, 2048, 32_768), {"batch_size": 64, "lr": 3e-4}),
}


# The steps inside these two save nothing for the backward pass.


@partial(nnx.remat, prevent_cse=False)
def normalized(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    return norm(x)


@partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return nnx.silu(gate) * up


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs of the features in ``[batch, length, heads, features]`` by their position."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * speeds[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Layer(nnx.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)). See `LanguageModel`."""

    def __init__(self, size: Size, attention: str | None, *, rngs: nnx.Rngs):
        self.size, self.attention = size, attention
        norm = partial(nnx.RMSNorm, size.width, dtype=BF16, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, dtype=BF16, rngs=rngs)
        qkv, out, gate_up, down = size.kernels
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.out = linear(*qkv), linear(*out)
        self.gate_up, self.down = linear(*gate_up), linear(*down)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = by_sequence(x)
        x = x + self.out(self.attend(self.qkv(normalized(self.attention_norm, x))))
        return x + self.down(swiglu(self.gate_up(normalized(self.mlp_norm, x))))

    def attend(self, qkv: jax.Array) -> jax.Array:
        heads, keys = self.size.heads, self.size.key_heads
        each = qkv.reshape(*qkv.shape[:2], heads + 2 * keys, -1)
        q, k, v = jnp.split(each, [heads, heads + keys], axis=2)
        # cuDNN's attention requires the same sharding of all three.
        q, k, v = map(by_sequence, (rotate(q), rotate(k), v))
        how: Any = {"is_causal": True, "implementation": self.attention}
        return jax.nn.dot_product_attention(q, k, v, **how).reshape(*qkv.shape[:2], -1)


class LanguageModel(nnx.Module):
    """Map int32[batch, length] tokens to bf16[batch, length, vocabulary] logits of the next ones.

    `attention` is an implementation of `jax.nn.dot_product_attention`. With `remat` only the input
    of each layer is saved for the backward pass. A mesh must be set: see `by_sequence`.
    """

    def __init__(
        self,
        size: Size,
        *,
        attention: str | None = None,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        @nnx.split_rngs(splits=size.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(size, attention, rngs=rngs)

        self.remat = remat
        self.embed = nnx.Embed(size.vocabulary, size.width, dtype=BF16, rngs=rngs)
        self.layers = stack(rngs)
        self.norm = nnx.RMSNorm(size.width, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run = lambda x, layer: layer(x)
        run = nnx.remat(run, prevent_cse=False) if self.remat else run
        x = by_sequence(self.embed(tokens))
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return by_sequence(self.head(normalized(self.norm, x)))
