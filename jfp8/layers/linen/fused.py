"""Fused normalization and matmuls in one layer, as in Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jfp8.layers import norm_math, transformer_math
from jfp8.layers.linen.layers import DenseGeneral
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.norm_math import LayerNormType
from jfp8.layers.options import NORM_OPTIONS, PRODUCT_OPTIONS, options_of
from jfp8.layers.transformer_math import Activation
from jfp8.matmul.spec import Implementation
from jfp8.products.mlp import through_both
from jfp8.recipes.in_effect import recipes_in_effect
from jfp8.recipes.registry import RecipeLike
from jfp8.scaling.formats import Format


class LayerNormDense(DenseGeneral):
    """`DenseGeneral` of a normalized input: ``y = normalize(x) @ kernel + bias``.

    The normalized input is quantized once, for fprop and for wgrad. Several projections of one
    activation can be one matmul with one kernel, ``features=(3, 64)``, and share that input.

    The ``params`` are ``scale`` and ``ln_bias`` of the shape of the axes, ``kernel`` and ``bias``,
    with the names (for ``axis=-1`` also shapes) of Transformer Engine's ``LayerNormDenseGeneral``.

    Attributes:
      features, axis, batch_dims, use_bias, dtype, param_dtype, kernel_init, bias_init, precision:
        see ``flax.linen.DenseGeneral``. The input is normalized over `axis`, which the matmul sums
        over.
      layernorm_type: ``"layernorm"`` or ``"rmsnorm"``; the latter has no ``ln_bias``.
      epsilon: added to the variance, or to the mean square.
      zero_centered_gamma: multiply by ``1 + scale``, which weight decay pulls towards 1.
      scale_init: initializer of ``scale``; None to start with a factor of 1.
      ln_bias_init: initializer of ``ln_bias``.
      return_layernorm_output: return ``(y, normalized)``, the second in high precision.
      saved_activations: save the input of the normalization in this format for the backward pass,
        with a scale for every few elements; None for high precision. See `jfp8.save_in_fp8`.
      recipe, implementation, state_collection: see `Dense`.

    Raises:
      ValueError: unknown `layernorm_type`; a hook for the matmul.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> layer = jfp8.linen.LayerNormDense((3, 4))
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    >>> {name: p.shape for name, p in sorted(params.items())}
    {'bias': (3, 4), 'kernel': (8, 3, 4), 'ln_bias': (8,), 'scale': (8,)}
    """

    layernorm_type: LayerNormType = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    ln_bias_init: Initializer = nn.initializers.zeros
    return_layernorm_output: bool = False
    saved_activations: Format | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, multiply: Callable[..., Any] | None = None) -> Any:
        """Apply the layer.

        Args:
          inputs, multiply: as for `DenseGeneral`.

        Returns:
          The result of `DenseGeneral`; or a pair of arrays, see `return_layernorm_output`.
        """
        normalized: Any = self._normalize(inputs)
        y = super().__call__(normalized, multiply)
        return (y, normalized) if self.return_layernorm_output else y

    def _normalize(self, x: jax.Array) -> jax.Array:
        axes = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
        shape = tuple(x.shape[axis] for axis in axes)
        neutral = nn.initializers.zeros if self.zero_centered_gamma else nn.initializers.ones
        scale = self.param("scale", self.scale_init or neutral, shape, self.param_dtype)
        bias = None
        if self.layernorm_type == "layernorm":
            bias = self.param("ln_bias", self.ln_bias_init, shape, self.param_dtype)
        dtype = nn.dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        options = options_of(self, NORM_OPTIONS)
        return norm_math.normalize(x, scale, bias, axes=axes, dtype=dtype, **options)


class LayerNormMLP(nn.Module):
    """Normalization and the two matmuls of a feed-forward block. ::

        y = dropout(activation(normalize(x) . wi)) . wo

    The projections that a gated activation multiplies are one matmul, with a kernel
    ``[in, 2, intermediate_dim]``; it is ``[in, 1, intermediate_dim]`` otherwise. The ``params`` are
    ``wi/{scale, ln_bias, kernel, bias}`` and ``wo/{kernel, bias}``; Transformer Engine names them
    ``scale, ln_bias, wi_kernel, wi_bias, wo_kernel, wo_bias``.

    Attributes:
      intermediate_dim: features between the matmuls.
      activation: ``"gelu"``, ``"silu"``, ``"relu"``, ``"squared_relu"``, or gated, ``"geglu"``,
        ``"swiglu"``, ``"reglu"``; see `jfp8.layers.transformer_math.activate`.
      intermediate_dropout_rate: rate of dropout after the activation, with the random stream
        ``dropout``.
      deterministic: disable dropout; may be given to the call instead.
      layernorm_type, epsilon, zero_centered_gamma: see `LayerNormDense`.
      use_bias, dtype, param_dtype, kernel_init, bias_init: of both matmuls; see
        ``flax.linen.Dense``.
      return_layernorm_output: return ``(y, normalized)``, the second in high precision.
      saved_activations: save the inputs of the normalization and of the activation in this format
        for the backward pass; see `LayerNormDense`.
      recipe, implementation, state_collection: see `Dense`.

    Raises:
      ValueError: unknown `activation` or `layernorm_type`; the message lists the known ones.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> mlp = jfp8.linen.LayerNormMLP(32, activation="swiglu")
    >>> y, variables = mlp.init_with_output(jax.random.key(0), jnp.ones((2, 8)))
    >>> y.shape, variables["params"]["wi"]["kernel"].shape
    ((2, 8), (8, 2, 32))
    """

    intermediate_dim: int
    activation: str = "gelu"
    intermediate_dropout_rate: float = 0.0
    deterministic: bool | None = None
    layernorm_type: LayerNormType = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros
    return_layernorm_output: bool = False
    saved_activations: Format | None = None
    recipe: RecipeLike | None = None
    implementation: Implementation = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> Any:
        """Apply the block.

        Args:
          inputs: ``[..., features]``.
          deterministic: disable dropout; required with dropout unless set in the constructor.

        Returns:
          ``[..., features]``; or a pair of arrays, see `return_layernorm_output`.
        """
        dense = options_of(self, (*PRODUCT_OPTIONS, "state_collection"))
        features = transformer_math.projections_of(self.activation), self.intermediate_dim
        wi = LayerNormDense(
            features,
            return_layernorm_output=True,
            **options_of(self, NORM_OPTIONS),
            **dense,
            name="wi",
        )
        wo = DenseGeneral(inputs.shape[-1], **dense, name="wo")
        if self._is_one_operation(inputs):
            make, shape = Activation(self.activation), (*inputs.shape[:-1], *features)
            y, normalized = through_both(partial(wi, inputs), wo, make, shape)
            return (y, normalized) if self.return_layernorm_output else y
        hidden, normalized = wi(inputs)
        hidden = transformer_math.activate(
            hidden, self.activation, saved_activations=self.saved_activations
        )
        if self.intermediate_dropout_rate:
            fixed = nn.merge_param("deterministic", self.deterministic, deterministic)
            hidden = nn.Dropout(self.intermediate_dropout_rate, deterministic=fixed)(hidden)
        y = wo(hidden)
        return (y, normalized) if self.return_layernorm_output else y

    @nn.nowrap
    def _is_one_operation(self, inputs: jax.Array) -> bool:
        between = self.saved_activations is not None or self.intermediate_dropout_rate > 0
        # Users may take a loss of intermediates.
        captured = self.is_initializing() or self.is_mutable_collection("intermediates")
        if between or captured:
            return False
        recipes = recipes_in_effect(self.recipe, ["/".join((*self.path, n)) for n in ("wi", "wo")])
        return transformer_math.may_be_one_operation(recipes, inputs, self.variables)
