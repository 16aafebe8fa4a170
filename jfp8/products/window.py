"""The window of a convolution: strides, padding, dilations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.products.operation import Operand


@dataclass(frozen=True)
class Window:
    """The movement of the kernel over the image, with an entry for each spatial dimension."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    groups: int  # groups of features

    def convolve(self, lhs: jax.Array, rhs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolve plain arrays, with f32 sums."""
        return lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.dimension_numbers,
            self.groups,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )

    def is_pointwise(self, kernel: Sequence[int]) -> bool:
        """Return True if it is a matmul: the kernel covers one pixel and visits each once."""
        taps = [kernel[d] for d in self.dimension_numbers.rhs_spec[2:]]
        edges = [n for pair in self.padding for n in pair]
        return {self.groups, *taps, *self.strides, *self.lhs_dilation} <= {1} and not any(edges)

    def check(self, lhs: jax.Array, rhs: Operand) -> None:
        """Raise JAX's own error if the shapes do not match."""
        shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
        jax.eval_shape(self.convolve, *shapes)


def window_of(
    lhs: jax.Array,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int = 1,
) -> Window:
    """Return the window that the arguments of `scaled_conv_general_dilated` describe."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    ones = (1,) * (lhs.ndim - 2)
    lhs_dilation, rhs_dilation = tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        if lhs_dilation != ones:
            raise ValueError(
                f"padding={padding!r} with lhs_dilation={lhs_dilation}: a transposed convolution "
                "needs explicit padding, a pair of ints for each spatial dimension; or use "
                "jax.lax.conv_transpose's rule."
            )
        dilated = lambda n, d: 0 if n == 0 else 1 + (n - 1) * d
        image = [dilated(lhs.shape[i], d) for i, d in zip(numbers.lhs_spec[2:], lhs_dilation)]
        kernel = [dilated(rhs.shape[i], d) for i, d in zip(numbers.rhs_spec[2:], rhs_dilation)]
        padding = lax.padtype_to_pads(image, kernel, window_strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    dilations = lhs_dilation, rhs_dilation
    return Window(tuple(window_strides), pads, *dilations, numbers, feature_group_count)
