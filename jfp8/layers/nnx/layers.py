"""Flax's own layers with FP8 matmuls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import jax
from flax import nnx
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike, PromoteDtypeFn

from jfp8.layers.conv_math import convolve_transposed
from jfp8.layers.nnx.hooks import install
from jfp8.layers.nnx.products import ConvGeneralDilated, DotGeneral
from jfp8.layers.nnx.signatures import ExplicitModule
from jfp8.layers.site import Begun, begin_at
from jfp8.matmul.spec import Implementation
from jfp8.products.dot_general import planned_dot_general
from jfp8.recipes.registry import RecipeLike


class FlaxOptions(TypedDict, total=False):
    """Arguments that Flax's layers take by name, and those that all layers here add."""

    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike
    kernel_init: Initializer
    bias_init: Initializer
    promote_dtype: PromoteDtypeFn
    preferred_element_type: Dtype | None
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    rngs: Required[nnx.Rngs]
    recipe: RecipeLike | None
    implementation: Implementation


class LinearOptions(FlaxOptions, total=False):
    """Arguments of `Linear`."""

    use_bias: bool


class GeneralOptions(LinearOptions, total=False):
    """Arguments of `LinearGeneral`."""

    axis: int | Sequence[int]
    batch_axis: Mapping[int, int]


class ConvTransposeOptions(LinearOptions, total=False):
    """Arguments of `ConvTranspose`."""

    padding: PaddingLike
    kernel_dilation: int | Sequence[int] | None
    mask: jax.Array | None
    transpose_kernel: bool


class ConvOptions(LinearOptions, total=False):
    """Arguments of `Conv`."""

    padding: PaddingLike
    input_dilation: int | Sequence[int] | None
    kernel_dilation: int | Sequence[int] | None
    feature_group_count: int
    mask: jax.Array | None


class FlaxLayer(ExplicitModule):
    """A base in front of a layer of Flax, which gives it an FP8 matmul."""

    def __init__(
        self,
        *args: Any,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        install(self, recipe=recipe, implementation=implementation)


class Linear(FlaxLayer, nnx.Linear):
    """``flax.nnx.Linear`` with its matmul, forward and backward, in FP8.

    Accepts every argument of ``nnx.Linear`` except ``dot_general``; the ``nnx.Param`` state is the
    same as in ``nnx.Linear``, with the same initial values for the same `rngs`. The kernel may be a
    `ScaledArray`. The other layers behave likewise, without Flax's arguments for the matmul.

    Args:
      recipe: the quantizer of each operand; None for the recipe of the `jfp8.autocast` region, or
        else ``DelayedScaling()``.
      implementation: see `jfp8.scaled_matmul`. For the others see ``nnx.Linear``.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self, in_features: int, out_features: int, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(in_features, out_features, **options)


class LinearGeneral(FlaxLayer, nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with its matmul, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        **options: Unpack[GeneralOptions],
    ) -> None:
        super().__init__(in_features, out_features, **options)

    def _begin(self, inputs: jax.Array) -> Begun:
        """Decide how the layer is computed as a part of a larger operation, for ``axis=-1``."""
        bias = None if self.bias is None else self.bias.get_value()
        operands = inputs, self.kernel.get_value(), bias
        x, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        plan, product = partial(planned_dot_general, dimension_numbers=numbers), self.dot_general
        assert isinstance(product, DotGeneral)
        return begin_at(product, plan, x, kernel, bias)


class Conv(FlaxLayer, nnx.Conv):
    """``flax.nnx.Conv`` with its convolution, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        **options: Unpack[ConvOptions],
    ) -> None:
        super().__init__(in_features, out_features, kernel_size, strides, **options)


class ConvTranspose(FlaxLayer, nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` with an FP8 convolution, forward and backward; see `Linear`."""

    conv_general_dilated: ConvGeneralDilated

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        **options: Unpack[ConvTransposeOptions],
    ) -> None:
        super().__init__(in_features, out_features, kernel_size, strides, **options)

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


class Einsum(FlaxLayer, nnx.Einsum):
    """``flax.nnx.Einsum`` with its matmul, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        **options: Unpack[FlaxOptions],
    ) -> None:
        super().__init__(einsum_str, kernel_shape, bias_shape, **options)
