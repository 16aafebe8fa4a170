"""Fused normalization and matmuls in one layer, as in Transformer Engine."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import flax.linen as nn
import jax
from flax.typing import Initializer

from jfp8.layers import norm_math
from jfp8.layers.linen.layers import DenseGeneral
from jfp8.layers.linen.nnx_blocks import block_in
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.nnx import fused as nnx_fused
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.norm_math import LayerNormType
from jfp8.layers.options import NORM_OPTIONS, options_of
from jfp8.layers.transformer_options import FeedForward, FeedForwardOptions
from jfp8.recipes.in_effect import recipes_in_effect
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

    def __call__(self, inputs: jax.Array) -> Any:
        """Return the result for `inputs`, or a pair, see `return_layernorm_output`."""
        normalized: Any = self._normalize(inputs)
        y = super().__call__(normalized)
        return (y, normalized) if self.return_layernorm_output else y

    @nn.compact
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


# A field of Linen's alone, at its place among those that may be given by position.
@dataclass(eq=False, repr=False)
class _LinenFeedForward(FeedForward):
    deterministic: bool | None = None


class LayerNormMLP(FeedForwardOptions, _LinenFeedForward, nn.Module):
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
      use_bias, dtype, param_dtype, kernel_init, bias_init: for both matmuls; see
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
        rate, given = self.intermediate_dropout_rate, (self.deterministic, deterministic)
        fixed = not rate or nn.merge_param("deterministic", *given)
        block = block_in(self, nnx_fused.LayerNormMLP, KINDS, in_features=inputs.shape[-1])
        paths = ["/".join((*self.path, name)) for name in ("wi", "wo")]
        # Users may take a loss of intermediates.
        captured = self.is_initializing() or self.is_mutable_collection("intermediates")
        recipes = [] if captured else recipes_in_effect(self.recipe, paths)
        return block._apply(inputs, fixed, recipes, self.variables)


KINDS = {LinearGeneral: DenseGeneral, nnx_fused.LayerNormLinear: LayerNormDense}
