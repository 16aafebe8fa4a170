"""Fused normalization and matmuls in one layer, as in Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Unpack

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Initializer

from jfp8.layers import norm_math, transformer_math
from jfp8.layers.nnx.layers import GeneralOptions, LinearGeneral
from jfp8.layers.nnx.parts import Parts
from jfp8.layers.nnx.products import DotGeneral
from jfp8.layers.nnx.signatures import ExplicitModule
from jfp8.layers.norm_math import LayerNormType
from jfp8.layers.options import NORM_OPTIONS, PRODUCT_OPTIONS, check_option, options_of
from jfp8.layers.site import mlp_at
from jfp8.layers.transformer_math import Activation
from jfp8.layers.transformer_options import FeedForwardOptions, InFeatures
from jfp8.products.mlp import hidden_like
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format


class LayerNormLinear(LinearGeneral):
    """`LinearGeneral` of a normalized input: ``y = normalize(x) @ kernel + bias``.

    The parameters, ``scale``, ``ln_bias``, ``kernel`` and ``bias``, have the names and shapes of
    `jfp8.linen.LayerNormDense`.

    Args:
      axis: the input is normalized over these axes, which the matmul sums over. For the others
        see `LinearGeneral` and `jfp8.linen.LayerNormDense`.

    Raises:
      ValueError: unknown `layernorm_type`; a hook for the matmul.

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
        **options: Unpack[GeneralOptions],
    ) -> None:
        check_option("layernorm_type", layernorm_type, ("layernorm", "rmsnorm"))
        super().__init__(in_features, out_features, **options)
        self.layernorm_type = layernorm_type
        self.epsilon = epsilon
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.saved_activations = saved_activations
        neutral = nnx.initializers.zeros if zero_centered_gamma else nnx.initializers.ones
        rngs = options["rngs"]
        make = lambda init: nnx.Param(init(rngs.params(), self.in_features, self.param_dtype))
        self.scale = make(scale_init or neutral)
        self.ln_bias = nnx.data(make(ln_bias_init) if layernorm_type == "layernorm" else None)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> Any:
        """Apply the layer; see ``flax.nnx.LinearGeneral`` for the arguments and shapes."""
        normalized = self._normalize(inputs)
        y = super().__call__(normalized, out_sharding=out_sharding)
        return (y, normalized) if self.return_layernorm_output else y

    # Flax's `nnx.tabulate` has a row for each called method without an underscore.
    def _normalize(self, inputs: jax.Array) -> jax.Array:
        scale = self.scale.get_value()
        bias = None if self.ln_bias is None else self.ln_bias.get_value()
        dtype = dtypes.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        options = options_of(self, NORM_OPTIONS)
        return norm_math.normalize(inputs, scale, bias, axes=self.axis, dtype=dtype, **options)


@dataclass(eq=False, repr=False)
class LayerNormMLP(FeedForwardOptions, InFeatures, ExplicitModule):
    """Normalization and the two matmuls of a feed-forward block. ::

        y = dropout(activation(normalize(x) . wi)) . wo

    The parameters are the same as in `jfp8.linen.LayerNormMLP`.

    Args:
      in_features: features of the input and the result.
      rngs: stream ``params`` for initial values, ``dropout`` for dropout. For the others see
        `jfp8.linen.LayerNormMLP`.

    Raises:
      ValueError: unknown `activation` or `layernorm_type`; the message lists the known ones.
      TypeError: an unknown option; likewise.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> mlp = jfp8.nnx.LayerNormMLP(8, 32, activation="swiglu", rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 8))).shape, mlp.wi.kernel.shape
    ((2, 8), (8, 2, 32))
    """

    _: KW_ONLY
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        parts, dense = Parts.of(rngs), options_of(self, PRODUCT_OPTIONS)
        norm = {"return_layernorm_output": True, **options_of(self, NORM_OPTIONS)}
        size, width = self.in_features, self.intermediate_dim
        self.projections = transformer_math.projections_of(self.activation)
        features = self.projections, width
        self.wi = parts.layer(LayerNormLinear, "wi", size, features, **norm, **dense)
        self.dropout = parts.dropout(self.intermediate_dropout_rate)
        self.wo = parts.layer(LinearGeneral, "wo", width, size, **dense)

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> Any:
        """Apply the block.

        Args:
          inputs: ``[..., in_features]``.
          deterministic: disable dropout; None for the setting of ``model.eval()`` or ``.train()``.

        Returns:
          ``[..., in_features]``; or a pair, see `return_layernorm_output`.
        """
        return self._apply(inputs, deterministic, *self._unchanged_layers())

    # Flax's `nnx.tabulate` has a row for each called method without an underscore.
    def _apply(
        self, inputs: jax.Array, deterministic: bool | None, recipes: Sequence[Recipe], weights: Any
    ) -> Any:
        """Apply the block, as one operation if `recipes` allow two matmuls to be one."""
        saved = self.wi.saved_activations
        between = saved is not None or self.dropout is not None
        if not between and transformer_math.may_be_one_operation(recipes, inputs, weights):
            shape = (*inputs.shape[:-1], self.projections, self.intermediate_dim)
            normalized = self.wi._normalize(inputs)
            first = self.wi._begin(normalized)
            second = self.wo._begin(hidden_like(first.planned, shape))
            y = mlp_at(first, second, Activation(self.activation), shape)
        else:
            hidden, normalized = self.wi(inputs)
            hidden = transformer_math.activate(hidden, self.activation, saved_activations=saved)
            if self.dropout is not None:
                hidden = self.dropout(hidden, deterministic=deterministic)
            y = self.wo(hidden)
        return (y, normalized) if self.return_layernorm_output else y

    def _unchanged_layers(self) -> tuple[list[Recipe], list[Any]]:
        """Return recipes in effect and kernels of the layers that users have not replaced."""
        known = {LayerNormLinear: self.wi, LinearGeneral: self.wo}
        layers = [layer for kind, layer in known.items() if type(layer) is kind]
        products = [x.dot_general for x in layers if isinstance(x.dot_general, DotGeneral)]
        found = [recipe_in_effect(product.recipe, product.path) for product in products]
        return [r for r in found if r], [layer.kernel.get_value() for layer in layers]
