"""Flax's own layers with FP8 matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfp8.layers.conv_transpose_math import convolve_transposed
from jfp8.layers.linen.products import (
    ConvGeneralDilated,
    DotGeneral,
    ProductModule,
    ProductOf,
    promote_dtype,
)
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.options import check_use_bias, kernel_dtype
from jfp8.layers.site import Begun, begin_at
from jfp8.matmul.spec import Implementation
from jfp8.products import einsum
from jfp8.products.dot_general import planned_dot_general
from jfp8.recipes.registry import RecipeLike


def own_product(layer: Any, product: type[ProductModule], hook: str) -> ProductOf:
    """Return the product of `layer`, or raise an error if it was given another one.

    `hook` is Flax's name for a function; ``{hook}_cls`` for its constructor.
    """
    check_use_bias(layer)
    given = getattr(layer, f"{hook}_cls")
    # A clone inherits the one of its original, which may have had another recipe.
    if getattr(layer, hook) is not None or not (given is None or isinstance(given, ProductOf)):
        name = type(layer).__name__
        flax = next(c for c in type(layer).__mro__ if c.__module__.startswith("flax."))
        raise ValueError(
            f"jfp8.{name} computes its matmul itself, so it takes neither {hook} nor "
            f"{hook}_cls. Pass recipe=..., or use flax.linen.{flax.__name__} with {hook}_cls."
        )
    return product_of(layer, product)


def product_of(layer: Any, product: type[ProductModule]) -> ProductOf:
    """Return a constructor of a `product` with the recipe and the state location of `layer`."""
    where = layer.state_collection
    return ProductOf(product, layer.recipe, layer.implementation, state_collection=where)


@dataclass(eq=False, repr=False)
class Fp8Layer:
    """The fields that the layers of this file add to Flax's."""

    recipe: RecipeLike | None = None
    implementation: Implementation = None
    promote_dtype: Callable[..., Any] = promote_dtype
    _: KW_ONLY
    state_collection: StateCollection = "fp8"


class Dense(Fp8Layer, nn.Dense):
    """``flax.linen.Dense`` with its matmul, forward and backward, in FP8.

    Accepts every argument of ``nn.Dense`` except ``dot_general`` and ``dot_general_cls``; the
    ``params`` are the same as in ``nn.Dense``, with the same initial values. The kernel may be a
    `ScaledArray`, see `jfp8.quantize_params`.

    Attributes:
      recipe: the quantizer of each operand; None for the recipe of the `jfp8.autocast` region, or
        else ``DelayedScaling()``.
      implementation: see `jfp8.scaled_matmul`.
      state_collection: collection of amax histories: ``"fp8"``, or ``"_overwrite_with_gradient"``
        for loops that replace its variables by their gradients, such as Flax's own ``TrainState``.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> variables = jfp8.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))
    >>> sorted(variables)
    ['fp8', 'fp8_sink', 'params']
    """

    def __post_init__(self) -> None:
        self.dot_general_cls = own_product(self, DotGeneral, "dot_general")
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return ``inputs . kernel + bias``, ``[..., features]``, for `inputs` ``[..., in]``."""
        inputs, kernel, bias, numbers = _operands(self, inputs, (self.features,))
        product = product_of(self, DotGeneral)()
        return product(inputs, kernel, numbers, self.precision, bias=bias)


def _operands(layer: Any, inputs: jax.Array, features: Sequence[int]) -> tuple[Any, ...]:
    """Return inputs, kernel and bias of the matmul of a layer, and its dimension numbers."""
    shape = (jnp.shape(inputs)[-1], *features)
    kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    bias = None
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, shape[1:], layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    return inputs, kernel, bias, (((inputs.ndim - 1,), (0,)), ((), ()))


class DenseGeneral(Fp8Layer, nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with its matmul, forward and backward, in FP8.

    Accepts all arguments of ``nn.DenseGeneral`` except ``dot_general`` and ``dot_general_cls``, and
    the `recipe`, `implementation` and `state_collection` of `Dense`.
    """

    def __post_init__(self) -> None:
        self.dot_general_cls = own_product(self, DotGeneral, "dot_general")
        super().__post_init__()

    @nn.compact
    def _begin(self, inputs: jax.Array) -> Begun:
        """Decide how the layer is computed as a part of a larger operation, for ``axis=-1``."""
        features = (self.features,) if isinstance(self.features, int) else self.features
        inputs, kernel, bias, numbers = _operands(self, inputs, features)
        plan = functools.partial(planned_dot_general, dimension_numbers=numbers)
        return begin_at(product_of(self, DotGeneral)(), plan, inputs, kernel, bias)


class Conv(Fp8Layer, nn.Conv):
    """``flax.linen.Conv`` with its convolution, forward and backward, in FP8.

    Accepts every argument of ``nn.Conv`` except ``conv_general_dilated`` and
    ``conv_general_dilated_cls``, and the `recipe`, `implementation` and `state_collection` of
    `Dense`.
    """

    def __post_init__(self) -> None:
        self.conv_general_dilated_cls = own_product(
            self, ConvGeneralDilated, "conv_general_dilated"
        )
        super().__post_init__()


class ConvTranspose(Fp8Layer, nn.ConvTranspose):
    """``flax.linen.ConvTranspose`` with its convolution, forward and backward, in FP8.

    Accepts every argument of ``nn.ConvTranspose``, and the `recipe`, `implementation` and
    `state_collection` of `Dense`.
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Apply the layer to `inputs`, ``[*batch, *space, features]``."""
        product = product_of(self, ConvGeneralDilated)
        return apply_conv_transpose(self, product, inputs)


class Einsum(Fp8Layer, nn.Einsum):
    """``flax.linen.Einsum`` with its matmul, forward and backward, in FP8.

    Accepts every argument of ``nn.Einsum``, and the `recipe`, `implementation` and
    `state_collection` of `Dense`.
    """

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: the left operand.
          einsum_str: the equation, unless given to the constructor: two operands and "->".
        """
        product = product_of(self, DotGeneral)
        return apply_einsum(self, product, inputs, einsum_str)


def apply_einsum(
    layer: nn.Einsum, product: ProductOf, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """Return the result of ``nn.Einsum.__call__``, computed by `product`: Flax has no hook."""
    equation = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    terms = einsum.parse(equation, inputs.ndim, len(layer.shape))
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    bias, sizes = None, dict(zip(terms.rhs, layer.shape, strict=True))
    if layer.use_bias:
        bias_shape = tuple(sizes[c] for c in terms.out if c in sizes)
        bias = layer.param("bias", layer.bias_init, bias_shape, layer.param_dtype)
    lhs, rhs, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    assert lhs is not None  # promotion preserves operands
    assert rhs is not None
    dot_general = product()
    y = einsum.as_dot_general(
        terms,
        lhs,
        rhs,
        lambda lhs, rhs, numbers: dot_general(
            lhs, rhs, numbers, layer.precision, layer.preferred_element_type
        ),
        kernel_dtype(lhs, rhs, casts_kernel=True),
    )
    if bias is not None:
        y += bias.reshape([sizes.get(c, 1) for c in terms.out])
    return y


def apply_conv_transpose(
    layer: nn.ConvTranspose, product: ProductOf, inputs: jax.Array
) -> jax.Array:
    """Return the result of ``nn.ConvTranspose.__call__``, computed by `product`."""
    size = layer.kernel_size
    window = (size,) if isinstance(size, int) else tuple(size)
    channels = (inputs.shape[-1], layer.features)
    shape = (*window, *(reversed(channels) if layer.transpose_kernel else channels))
    kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    bias = None
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype)
    promote = functools.partial(layer.promote_dtype, dtype=layer.dtype)
    return convolve_transposed(layer, inputs, kernel, bias, promote=promote, convolve=product())
