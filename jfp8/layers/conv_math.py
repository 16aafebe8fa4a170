"""Convolutions of layers, for both Linen and NNX: their call, and transposed ones as in Flax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax

from jfp8.layers.site import Multiplies
from jfp8.products.conv import convolutions
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


class ConvCall(Multiplies):
    """The call of a module in place of ``jax.lax.conv_general_dilated``."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return ``jax.lax.conv_general_dilated`` in FP8; see `jfp8.scaled_conv_general_dilated`.

        Args:
          lhs, rhs: ``f32 | bf16 | f16`` arrays: images and kernels; `rhs` may be a `ScaledArray`.
          precision: the convolution's if FP8 is disabled (see `jfp8.autocast`).
          out_sharding: sharding of the result, for meshes with explicit axes.
        """
        window: Any = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
        how: Any = (feature_group_count, precision, preferred_element_type, out_sharding)
        return self._multiply(*convolutions(*window, *how), lhs, rhs, "conv")
