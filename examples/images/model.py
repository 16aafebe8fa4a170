"""A small ResNet: the convolutions of its blocks are FP8 matmuls; stem, norms and head are not.

`recipe=None` builds the same model in float32. Both have the same parameter tree and, for the same
key, the same initial values, so the two can be trained side by side.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jfp8

CLASSES = 10


def patches(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Return the inputs of each output pixel of a convolution with "SAME" padding.

    [batch, h, w, c] -> [batch, ceil(h / stride), ceil(w / stride), size * size * c], channels
    fastest, as in a kernel [size, size, c, features].
    """
    rows, columns = (-(-n // stride) for n in x.shape[1:3])
    padding = [
        max((out - 1) * stride + size - n, 0) for out, n in zip((rows, columns), x.shape[1:3])
    ]
    x = jnp.pad(x, [(0, 0), *((p // 2, p - p // 2) for p in padding), (0, 0)])
    bottom, right = (rows - 1) * stride + 1, (columns - 1) * stride + 1
    return jnp.concatenate(
        [
            x[:, i : i + bottom : stride, j : j + right : stride]
            for i in range(size)
            for j in range(size)
        ],
        axis=-1,
    )


class Conv(nn.Module):
    """Compute `nn.Conv(features, (size, size), stride, use_bias=False)` as one matmul over patches.

    Parameters, their initial values and, without a recipe, the result are the same as of `nn.Conv`.
    """

    features: int
    size: int = 3
    stride: int = 1
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        seen = patches(x, self.size, self.stride)
        lhs, rhs = seen.reshape(-1, seen.shape[-1]), kernel.reshape(-1, self.features)

        if self.recipe is None:
            y = lhs @ rhs
        else:
            y = jfp8.linen.DotGeneral(recipe=self.recipe)(lhs, rhs, (((1,), (0,)), ((), ())))
        return y.reshape(*seen.shape[:-1], self.features)


def norm(x: jax.Array, train: bool, name: str) -> jax.Array:
    """Create a norm, with statistics in the `batch_stats` collection."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, name=name)(x)


class Block(nn.Module):
    """Compute relu(norm(conv(relu(norm(conv(x))))) + x), with one more conv to change shapes."""

    features: int
    stride: int
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = Conv(self.features, stride=self.stride, recipe=self.recipe, name="conv_1")(x)
        y = nn.relu(norm(y, train, "norm_1"))
        y = Conv(self.features, recipe=self.recipe, name="conv_2")(y)
        y = norm(y, train, "norm_2")
        if x.shape != y.shape:
            x = Conv(self.features, 1, self.stride, self.recipe, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Map f32[batch, height, width, 1] images -> f32[batch, 10] logits."""

    widths: tuple[int, ...] = (16, 32, 64)
    recipe: Any = None

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = Conv(self.widths[0], stride=2, name="stem")(images)
        x = nn.relu(norm(x, train, "norm"))
        for i, width in enumerate(self.widths):
            stride = 1 if i == 0 else 2
            x = Block(width, stride, self.recipe, name=f"block_{i}")(x, train)
        return nn.Dense(CLASSES, name="head")(x.mean(axis=(1, 2)))
