"""Normalisation, product and what follows as one layer, as Transformer Engine has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer

from jfp8.layers import transformer_math
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.transformer_math import LayerNormType, check_choice
from jfp8.matmul.choice import Implementation
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format

default_kernel_init = nnx.initializers.lecun_normal()


class LayerNormLinear(LinearGeneral):
    """`LinearGeneral` of a normalised input: ``y = normalize(x) . kernel + bias``.

    The normalised input is quantized once, for fprop and for wgrad. Several projections of one
    activation are one product with one kernel, ``out_features=(3, 64)``, and share that too.

    The parameters are ``scale`` and ``ln_bias`` of the shape of `in_features`, ``kernel`` and
    ``bias``, named and shaped as those of `jfp8.linen.LayerNormDense`.

    Args:
      in_features, out_features, axis, dtype, param_dtype, rngs, kwargs: as for `LinearGeneral`.
        The input is normalised over `axis`, what the product sums over.
      layernorm_type: ``"layernorm"`` or ``"rmsnorm"``; the latter has no ``ln_bias``.
      epsilon: added to the variance, or to the mean square.
      zero_centered_gamma: multiply by ``1 + scale``, which weight decay draws to 1.
      scale_init: of ``scale``; None: such that the factor starts as 1.
      ln_bias_init: of ``ln_bias``.
      return_layernorm_output: return ``(y, normalized)``, the second in high precision.
      saved_activations: keep the input of the normalisation in this format for the backward pass,
        with a scale for every few elements; None: in high precision. See `jfp8.save_in_fp8`.

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
        check_choice("layernorm_type", layernorm_type, ("layernorm", "rmsnorm"))
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
        scale = self.scale.get_value()
        bias = None if self.ln_bias is None else self.ln_bias.get_value()
        normalized = transformer_math.normalize(
            inputs,
            scale,
            bias,
            axes=self.axis,
            epsilon=self.epsilon,
            layernorm_type=self.layernorm_type,
            zero_centered_gamma=self.zero_centered_gamma,
            saved_activations=self.saved_activations,
        )
        dtype = dtypes.canonicalize_dtype(inputs, scale, bias, dtype=self.dtype)
        normalized = normalized.astype(dtype)
        y = super().__call__(normalized, out_sharding=out_sharding)
        return (y, normalized) if self.return_layernorm_output else y


class LayerNormMLP(nnx.Module):
    """Normalisation and the two products of a feed-forward block. ::

        y = dropout(activation(normalize(x) . wi)) . wo

    The projections that a gated activation multiplies are one product, with a kernel
    ``[in, 2, intermediate_dim]``; it is ``[in, 1, intermediate_dim]`` otherwise. The parameters,
    ``wi/{scale, ln_bias, kernel, bias}`` and ``wo/{kernel, bias}``, are those of
    `jfp8.linen.LayerNormMLP`.

    Args:
      in_features: features of the input and the result.
      intermediate_dim: features between the products.
      activation: ``"gelu"``, ``"silu"``, ``"relu"``, ``"squared_relu"``, or gated, ``"geglu"``,
        ``"swiglu"``, ``"reglu"``; see `jfp8.layers.transformer_math.activate`.
      intermediate_dropout_rate: of an ``nnx.Dropout`` after the activation.
      layernorm_type, epsilon, zero_centered_gamma: see `LayerNormLinear`.
      use_bias, dtype, param_dtype, kernel_init, bias_init: of both products; see
        ``flax.nnx.Linear``.
      return_layernorm_output: return ``(y, normalized)``, the second in high precision.
      saved_activations: keep the inputs of the normalisation and of the activation in this format
        for the backward pass; see `LayerNormLinear`.
      recipe, implementation: see `Linear`.
      rngs: stream ``params`` for initial values, ``dropout`` for dropout.

    Raises:
      ValueError: unknown `activation` or `layernorm_type`; the message lists the known ones.

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
        layernorm_type: LayerNormType = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        return_layernorm_output: bool = False,
        saved_activations: Format | None = None,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        common: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "recipe": recipe,
            "implementation": implementation,
            "rngs": rngs,
        }
        self.activation = activation
        self.return_layernorm_output = return_layernorm_output
        self.saved_activations = saved_activations
        self.wi = LayerNormLinear(
            in_features,
            (transformer_math.projections_of(activation), intermediate_dim),
            layernorm_type=layernorm_type,
            epsilon=epsilon,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=True,
            saved_activations=saved_activations,
            **common,
        )
        self.dropout = dropout_or_none(intermediate_dropout_rate, rngs)
        self.wo = LinearGeneral(intermediate_dim, in_features, **common)

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> Any:
        """Apply the block.

        Args:
          inputs: ``[..., in_features]``.
          deterministic: no dropout; None: what ``model.eval()`` and ``model.train()`` set.

        Returns:
          ``[..., in_features]``; or a pair, see `return_layernorm_output`.
        """
        hidden, normalized = self.wi(inputs)
        hidden = transformer_math.activate(
            hidden, self.activation, saved_activations=self.saved_activations
        )
        if self.dropout is not None:
            hidden = self.dropout(hidden, deterministic=deterministic)
        y = self.wo(hidden)
        return (y, normalized) if self.return_layernorm_output else y


def dropout_or_none(rate: float, rngs: nnx.Rngs) -> Any:
    """An ``nnx.Dropout`` as an attribute, which without dropout would hold a stream for nothing."""
    return nnx.data(nnx.Dropout(rate, rngs=rngs) if rate else None)
