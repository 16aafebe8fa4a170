"""Code around the convolution of Flax's transposed convolutions, for both Linen and NNX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax

from jfp8.products.conv_transpose import conv_transpose
from jfp8.scaling.arrays import ScaledArray


def convolve_transposed(
    layer: Any,
    inputs: jax.Array,
    kernel: jax.Array | ScaledArray,
    bias: jax.Array | None,
    *,
    promote: Callable[..., Iterable[Any]],
    convolve: Callable[..., jax.Array],
) -> jax.Array:
    """Return the result of Flax's ``ConvTranspose.__call__``, with another convolution inside.

    Args:
      layer: an ``nn.ConvTranspose`` or an ``nnx.ConvTranspose``.
      promote: casts the inputs, the kernel and the bias to one dtype.
      convolve: called like ``jax.lax.conv_general_dilated``.
    """
    rank = len(kernel.shape) - 2
    spread = lambda x: (x or 1,) * rank if x is None or isinstance(x, int) else tuple(x)
    strides, dilation = spread(layer.strides), spread(layer.kernel_dilation)
    padding = nn.linear.canonicalize_padding(layer.padding, rank)
    if layer.mask is not None:
        if layer.mask.shape != kernel.shape:
            raise ValueError(
                f"mask must have the shape of the kernel, {kernel.shape}, not {layer.mask.shape}."
            )
        kernel = (kernel.dequantize() if isinstance(kernel, ScaledArray) else kernel) * layer.mask
    batch, image = inputs.shape[: -rank - 1], inputs.shape[-rank - 1 :]
    lhs, rhs, bias = promote(inputs.reshape(-1, *image), kernel, bias)
    y = conv_transpose(
        lhs,
        rhs,
        strides,
        padding,
        dilation,
        layer.transpose_kernel,
        functools.partial(
            convolve,
            precision=layer.precision,
            preferred_element_type=layer.preferred_element_type,
        ),
    )
    if bias is not None:
        y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
    return y.reshape(*batch, *y.shape[1:])
