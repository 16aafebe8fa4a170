"""Flax's transposed convolution with a hook for its convolution, which Flax's own lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import lax

from jfp8.products.conv_transpose import conv_transpose
from jfp8.scaling.arrays import ScaledArray


class HookedConvTranspose(nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` that computes its convolution with `conv_general_dilated`.

    Args:
      *args, **kwargs: as for ``nnx.ConvTranspose``.
      conv_general_dilated: called like ``jax.lax.conv_general_dilated``.
    """

    def __init__(
        self,
        *args: Any,
        conv_general_dilated: Callable[..., jax.Array] = lax.conv_general_dilated,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conv_general_dilated = conv_general_dilated

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[*batch, *space, features]``.
        """
        rank = len(self.kernel_size)
        spread = lambda x: (x or 1,) * rank if x is None or isinstance(x, int) else tuple(x)
        batch, image = inputs.shape[: -rank - 1], inputs.shape[-rank - 1 :]
        if self.mask is not None and self.mask.shape != self.kernel_shape:
            raise ValueError(
                f"mask must have the shape of the kernel, {self.kernel_shape}, not "
                f"{self.mask.shape}."
            )
        kernel = self.kernel.get_value()
        if self.mask is not None:
            kernel = (
                kernel.dequantize() if isinstance(kernel, ScaledArray) else kernel
            ) * self.mask
        bias = None if self.bias is None else self.bias.get_value()
        inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        y = conv_transpose(
            inputs.reshape(-1, *image),
            kernel,
            spread(self.strides),
            canonicalize_padding(self.padding, rank),
            spread(self.kernel_dilation),
            self.transpose_kernel,
            functools.partial(
                self.conv_general_dilated,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
            ),
        )
        if bias is not None:
            y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
        return y.reshape(*batch, *y.shape[1:])
