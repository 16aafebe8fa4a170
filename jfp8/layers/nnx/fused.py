"""Normalisation and the products after it as one layer, as in Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Initializer

from jfp8.layers import norm_math, transformer_math
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.nnx.products import DotGeneral
from jfp8.layers.norm_math import LayerNormType
from jfp8.layers.options import NORM_OPTIONS, PRODUCT_OPTIONS, check_names, check_option, options_of
from jfp8.layers.transformer_math import Activation
from jfp8.products.mlp import through_both
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.scaling.formats import Format


class LayerNormLinear(LinearGeneral):
    """`LinearGeneral` of a normalised input: ``y = normalize(x) . kernel + bias``.

    The parameters, ``scale``, ``ln_bias``, ``kernel`` and ``bias``, are named and shaped as those
    of `jfp8.linen.LayerNormDense`.

    Args:
      in_features, out_features, rngs, kwargs: as for `LinearGeneral`. The input is normalised over
        its ``axis``, which the product sums over.
      layernorm_type, epsilon, zero_centered_gamma, scale_init, ln_bias_init: as for
        `jfp8.linen.LayerNormDense`.
      return_layernorm_output, saved_activations: likewise.

    Raises:
      ValueError: unknown `layernorm_type`; a hook for the product.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.LayerNormLinear(8, (3, 4), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8))).shape
    (2, 3, 4)
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        layernorm_type: LayerNormType = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        scale_init: Initializer | None = None,
        ln_bias_init: Initializer = nnx.initializers.zeros,
        return_layernorm_output: bool = False,
        saved_activations: Format | None = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        check_option("layernorm_type", layernorm_type, ("layernorm", "rmsnorm"))
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.layernorm_type = layernorm_type
        self.epsilon = epsilon
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.saved_activations = saved_activations
        neutral = nnx.initializers.zeros if zero_centered_gamma else nnx.initializers.ones
        make = lambda init: nnx.Param(init(rngs.params(), self.in_features, self.param_dtype))
        self.scale = make(scale_init or neutral)
        self.ln_bias = nnx.data(make(ln_bias_init) if layernorm_type == "layernorm" else None)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> Any:
        """Apply the layer; see ``flax.nnx.LinearGeneral`` for the arguments and shapes."""
        normalized = self.normalize(inputs)
        y = super().__call__(normalized, out_sharding=out_sharding)
        return (y, normalized) if self.return_layernorm_output else y

    def normalize(self, inputs: jax.Array) -> jax.Array:
        """Return the normalized inputs, as the product takes them.

        Args:
          inputs: ``f32 | bf16 | f16`` array, normalized along the axes that the product sums over.
        """
        scale = self.scale.get_value()
        bias = None if self.ln_bias is None else self.ln_bias.get_value()
        dtype = dtypes.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        options = options_of(self, NORM_OPTIONS)
        return norm_math.normalize(inputs, scale, bias, axes=self.axis, dtype=dtype, **options)


class LayerNormMLP(nnx.Module):
    """Normalisation and the two products of a feed-forward block. ::

        y = dropout(activation(normalize(x) . wi)) . wo

    The parameters are those of `jfp8.linen.LayerNormMLP`.

    Args:
      in_features: features of the input and the result.
      intermediate_dim, activation, intermediate_dropout_rate, return_layernorm_output: as for
        `jfp8.linen.LayerNormMLP`.
      rngs: stream ``params`` for initial values, ``dropout`` for dropout.
      options: as for `LayerNormLinear`: ``layernorm_type``, ``epsilon``, ``zero_centered_gamma``,
        ``saved_activations``; and, of both products, ``use_bias``, ``dtype``, ``param_dtype``,
        ``kernel_init``, ``bias_init``, ``recipe``, ``implementation``.

    Raises:
      ValueError: unknown `activation` or `layernorm_type`; the message lists the known ones.
      TypeError: an unknown option; likewise.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> mlp = jfp8.nnx.LayerNormMLP(8, 32, activation="swiglu", rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 8))).shape, mlp.wi.kernel.shape
    ((2, 8), (8, 2, 32))
    """

    def __init__(
        self,
        in_features: int,
        intermediate_dim: int,
        *,
        activation: str = "gelu",
        intermediate_dropout_rate: float = 0.0,
        return_layernorm_output: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_names(LayerNormMLP, options, (*NORM_OPTIONS, *PRODUCT_OPTIONS))
        self.activation = activation
        self.return_layernorm_output = return_layernorm_output
        self.wi = LayerNormLinear(
            in_features,
            (transformer_math.projections_of(activation), intermediate_dim),
            return_layernorm_output=True,
            **options,
            rngs=rngs,
        )
        self.dropout = dropout_or_none(intermediate_dropout_rate, rngs)
        dense = {name: value for name, value in options.items() if name in PRODUCT_OPTIONS}
        self.wo = LinearGeneral(intermediate_dim, in_features, **dense, rngs=rngs)

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> Any:
        """Apply the block.

        Args:
          inputs: ``[..., in_features]``.
          deterministic: no dropout; None: what ``model.eval()`` and ``model.train()`` set.

        Returns:
          ``[..., in_features]``; or a pair, see `return_layernorm_output`.
        """
        if self._is_one_operation(inputs):
            normalized, make = self.wi.normalize(inputs), Activation(self.activation)
            first, second = partial(_product, self.wi, normalized), partial(_product, self.wo)
            shape = (*inputs.shape[:-1], *self.wi.out_features)
            y = through_both(first, second, make, shape)
        else:
            hidden, normalized = self.wi(inputs)
            saved = self.wi.saved_activations
            hidden = transformer_math.activate(hidden, self.activation, saved_activations=saved)
            if self.dropout is not None:
                hidden = self.dropout(hidden, deterministic=deterministic)
            y = self.wo(hidden)
        return (y, normalized) if self.return_layernorm_output else y

    def _is_one_operation(self, inputs: jax.Array) -> bool:
        # Others may have put something else there.
        known = {LayerNormLinear: self.wi, LinearGeneral: self.wo}
        layers = [layer for kind, layer in known.items() if type(layer) is kind]
        products: list[Any] = [layer.dot_general for layer in layers]
        products = [product for product in products if isinstance(product, DotGeneral)]
        if self.dropout is not None or len(products) < 2 or products[1].reads_operands():
            return False
        found = [recipe_in_effect(product.recipe, product.path) for product in products]
        recipes = [] if self.wi.saved_activations is not None else [r for r in found if r]
        kernels = [layer.kernel.get_value() for layer in layers]
        return transformer_math.may_be_one_operation(recipes, inputs, kernels)


def _product(layer: Any, x: jax.Array, multiply: Callable[..., Any]) -> Any:
    """Multiply as `layer` does, along the last axis; `multiply` adds the bias."""
    bias = None if layer.bias is None else layer.bias.get_value()
    operands = x, layer.kernel.get_value(), bias
    x, kernel, bias = layer.promote_dtype(operands, dtype=layer.dtype)
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return layer.dot_general(x, kernel, numbers, multiply=partial(multiply, bias=bias))


def dropout_or_none(rate: float, rngs: nnx.Rngs) -> Any:
    """Return an ``nnx.Dropout`` as an attribute; None without dropout, which needs no stream."""
    return nnx.data(nnx.Dropout(rate, rngs=rngs) if rate else None)
