"""Flax's own layers with FP8 matmuls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike, PromoteDtypeFn

from jfp8.layers.conv_transpose_math import convolve_transposed
from jfp8.layers.nnx.hooks import install
from jfp8.layers.nnx.products import ConvGeneralDilated, DotGeneral
from jfp8.layers.nnx.signatures import ExplicitModule
from jfp8.layers.options import pass_on
from jfp8.layers.site import Begun, begin_at
from jfp8.matmul.spec import Implementation
from jfp8.products.dot_general import planned_dot_general
from jfp8.recipes.registry import RecipeLike

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Linear(ExplicitModule, nnx.Linear):
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
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = EMPTY,
        bias_metadata: Mapping[str, Any] = EMPTY,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
    ) -> None:
        pass_on(super().__init__, locals())
        install(self, recipe=recipe, implementation=implementation)


class LinearGeneral(ExplicitModule, nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with its matmul, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = EMPTY,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = EMPTY,
        bias_metadata: Mapping[str, Any] = EMPTY,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
    ) -> None:
        pass_on(super().__init__, locals())
        install(self, recipe=recipe, implementation=implementation)

    def _begin(self, inputs: jax.Array) -> Begun:
        """Decide how the layer is computed as a part of a larger operation, for ``axis=-1``."""
        bias = None if self.bias is None else self.bias.get_value()
        operands = inputs, self.kernel.get_value(), bias
        x, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        plan, product = partial(planned_dot_general, dimension_numbers=numbers), self.dot_general
        assert isinstance(product, DotGeneral)
        return begin_at(product, plan, x, kernel, bias)


class Conv(ExplicitModule, nnx.Conv):
    """``flax.nnx.Conv`` with its convolution, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = EMPTY,
        bias_metadata: Mapping[str, Any] = EMPTY,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
    ) -> None:
        pass_on(super().__init__, locals())
        install(self, recipe=recipe, implementation=implementation)


class ConvTranspose(ExplicitModule, nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` with an FP8 convolution, forward and backward; see `Linear`."""

    conv_general_dilated: ConvGeneralDilated

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = EMPTY,
        bias_metadata: Mapping[str, Any] = EMPTY,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
    ) -> None:
        pass_on(super().__init__, locals())
        install(self, recipe=recipe, implementation=implementation)

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


class Einsum(ExplicitModule, nnx.Einsum):
    """``flax.nnx.Einsum`` with its matmul, forward and backward, in FP8; see `Linear`."""

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = EMPTY,
        bias_metadata: Mapping[str, Any] = EMPTY,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
    ) -> None:
        pass_on(super().__init__, locals())
        install(self, recipe=recipe, implementation=implementation)
