"""Flax's transposed convolution with a hook for its convolution, which Flax's own lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from jfp8.layers.conv_transpose import convolve_transposed


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
        return convolve_transposed(
            self,
            inputs,
            self.kernel.get_value(),
            None if self.bias is None else self.bias.get_value(),
            promote=lambda *arrays: self.promote_dtype(arrays, dtype=self.dtype),
            convolve=self.conv_general_dilated,
        )
