"""The formulas of normalizations: functions of arrays, without a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.layers.options import check_option
from jfp8.products.saved_activations import keeping_inputs
from jfp8.scaling.formats import Format

LayerNormType = Literal["layernorm", "rmsnorm"]


def normalize(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    axes: Sequence[int] = (-1,),
    epsilon: float = 1e-6,
    layernorm_type: LayerNormType = "layernorm",
    zero_centered_gamma: bool = False,
    saved_activations: Format | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Compute layer normalization, or root mean square normalization. ::

        layernorm  y = (x - mean(x)) / sqrt(var(x) + epsilon) * gamma + bias
        rmsnorm    y =  x            / sqrt(mean(x^2) + epsilon) * gamma + bias

    ``gamma`` is `scale`, or ``1 + scale`` with `zero_centered_gamma`.

    Args:
      scale, bias: arrays of the shape of `axes`, in the order of `axes`.
      axes: axes of `x` over which it is normalized.
      saved_activations: save `x` in this format for the backward pass; None for its own dtype.
      dtype: dtype of the result, which is computed at least in float32; None for that dtype.

    References:
      arXiv 1607.06450 (LayerNorm), arXiv 1910.07467 (RMSNorm).
    """
    check_option("layernorm_type", layernorm_type, ("layernorm", "rmsnorm"))
    axes = tuple(axis % x.ndim for axis in axes)

    def run(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if layernorm_type == "layernorm":
            x = x - jnp.mean(x, axes, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + epsilon)
        gamma = _along(scale, axes, x)
        y = y * (1 + gamma if zero_centered_gamma else gamma)
        y = y if bias is None else y + _along(bias, axes, x)
        # Here, because inputs and outputs of `run` are arrays in memory, in both directions.
        return y if dtype is None else y.astype(dtype)

    return keeping_inputs(run, saved_activations)(x, scale, bias)


def _along(parameter: jax.Array, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Return `parameter`, whose dimensions are `axes` of `x`, in a shape that broadcasts to `x`."""
    parameter = parameter.astype(x.dtype).transpose(np.argsort(axes).tolist())
    return parameter.reshape([n if d in axes else 1 for d, n in enumerate(x.shape)])
