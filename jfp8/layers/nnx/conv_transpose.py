"""Flax's transposed convolution with a hook for its convolution, which Flax's own lacks."""

from __future__ import annotations

import jax
from flax import nnx

from jfp8.layers.conv_transpose import convolve_transposed
from jfp8.layers.nnx.products import ConvGeneralDilated


class HookedConvTranspose(nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` that computes its convolution with `conv_general_dilated`."""

    conv_general_dilated: ConvGeneralDilated

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Apply the layer to ``[*batch, *space, features]``."""
        return convolve_transposed(
            self,
            inputs,
            self.kernel.get_value(),
            None if self.bias is None else self.bias.get_value(),
            promote=lambda *arrays: self.promote_dtype(arrays, dtype=self.dtype),
            convolve=self.conv_general_dilated,
        )
