"""Flax's own layers with FP8 matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfp8.layers.conv_math import convolve_transposed
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
    """The fields that the layers of this file add to Flax's, and the matmuls for Flax's hooks."""

    _hooks: ClassVar[Mapping[str, type[ProductModule]]] = {}

    recipe: RecipeLike | None = None
    implementation: Implementation = None
    promote_dtype: Callable[..., Any] = promote_dtype
    _: KW_ONLY
    state_collection: StateCollection = "fp8"

    def __post_init__(self) -> None:
        for hook, product in self._hooks.items():
            setattr(self, f"{hook}_cls", own_product(self, product, hook))
        super().__post_init__()  # pyrefly: ignore


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

    _hooks = {"dot_general": DotGeneral}

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return ``inputs . kernel + bias``, ``[..., features]``, for `inputs` ``[..., in]``."""
        inputs, kernel, bias, numbers = _operands(self, inputs, (self.features,))
        product = product_of(self, DotGeneral)()
        return product(inputs, kernel, numbers, self.precision, bias=bias)


def _parameters(layer: Any, shape: Sequence[int], bias_shape: Sequence[int]) -> tuple[Any, Any]:
    """Return the kernel of a layer, and its bias or None."""
    kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    if not layer.use_bias:
        return kernel, None
    return kernel, layer.param("bias", layer.bias_init, bias_shape, layer.param_dtype)


def _operands(layer: Any, inputs: jax.Array, features: Sequence[int]) -> tuple[Any, ...]:
    """Return inputs, kernel and bias of the matmul of a layer, and its dimension numbers."""
    shape = (jnp.shape(inputs)[-1], *features)
    kernel, bias = _parameters(layer, shape, features)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    return inputs, kernel, bias, (((inputs.ndim - 1,), (0,)), ((), ()))


class DenseGeneral(Fp8Layer, nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with its matmul, forward and backward, in FP8.

    Accepts all arguments of ``nn.DenseGeneral`` except ``dot_general`` and ``dot_general_cls``, and
    the `recipe`, `implementation` and `state_collection` of `Dense`.
    """

    _hooks = {"dot_general": DotGeneral}

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

    _hooks = {"conv_general_dilated": ConvGeneralDilated}


class ConvTranspose(Fp8Layer, nn.ConvTranspose):
    """``flax.linen.ConvTranspose`` with its convolution, forward and backward, in FP8.

    Accepts every argument of ``nn.ConvTranspose``, and the `recipe`, `implementation` and
    `state_collection` of `Dense`.
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Apply the layer to `inputs`, ``[*batch, *space, features]``."""
        size = self.kernel_size
        window = (size,) if isinstance(size, int) else tuple(size)
        channels = (inputs.shape[-1], self.features)
        shape = (*window, *(reversed(channels) if self.transpose_kernel else channels))
        kernel, bias = _parameters(self, shape, (self.features,))
        how = {
            "promote": functools.partial(self.promote_dtype, dtype=self.dtype),
            "convolve": product_of(self, ConvGeneralDilated)(),
        }
        return convolve_transposed(self, inputs, kernel, bias, **how)


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
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        terms = einsum.parse(equation, inputs.ndim, len(self.shape))
        sizes = dict(zip(terms.rhs, self.shape, strict=True))
        bias_shape = tuple(sizes[c] for c in terms.out if c in sizes)
        kernel, bias = _parameters(self, self.shape, bias_shape)
        lhs, rhs, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        product = product_of(self, DotGeneral)()
        how = self.precision, self.preferred_element_type
        multiply = lambda lhs, rhs, numbers: product(lhs, rhs, numbers, *how)
        rhs_dtype = kernel_dtype(lhs, rhs, casts_kernel=True)
        y = einsum.as_dot_general(terms, lhs, rhs, multiply, rhs_dtype)
        return y if bias is None else y + bias.reshape([sizes.get(c, 1) for c in terms.out])
