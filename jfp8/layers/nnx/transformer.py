"""A whole Transformer layer, encoder or decoder, with all its projections in FP8."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jfp8.layers import transformer_math
from jfp8.layers.nnx.fused import (
    LayerNormLinear,
    LayerNormMLP,
    default_kernel_init,
    dropout_or_none,
)
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.nnx.products import EinsumOp
from jfp8.layers.transformer_math import GroupMethod, LayerNormType, check_choice
from jfp8.matmul.choice import Implementation
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format

default_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform")


class RelativePositionBiases(nnx.Module):
    """A learned bias of attention scores for each head and distance, as in T5.

    The parameter is ``rel_embedding``, ``[num_attention_heads, num_buckets]``. T5 shares one among
    all layers: give its result to each as ``attention_bias``.

    Args:
      num_attention_heads: heads of the query.
      num_buckets, max_distance: see `jfp8.layers.transformer_math.relative_position_buckets`.
      embedding_init: of the table.
      dtype: of the result; None: `param_dtype`.
      param_dtype: of the table.
      rngs: stream ``params`` for initial values.
    """

    def __init__(
        self,
        num_attention_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        embedding_init: Initializer = default_embedding_init,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.max_distance = max_distance
        self.dtype = dtype or param_dtype
        shape = (num_attention_heads, num_buckets)
        self.rel_embedding = nnx.Param(embedding_init(rngs.params(), shape, param_dtype))

    def __call__(self, query_length: int, key_length: int, bidirectional: bool = True) -> jax.Array:
        """The biases, ``[1, heads, query_length, key_length]``.

        Args:
          bidirectional: whether keys after a query have distances of their own.
        """
        return transformer_math.relative_position_bias(
            self.rel_embedding.get_value().astype(self.dtype),
            query_length,
            key_length,
            bidirectional=bidirectional,
            max_distance=self.max_distance,
        )[None]


class LayerNormAttention(nnx.Module):
    """Normalisation, attention of grouped queries and its projections: a part of a layer.

    Queries, keys and values of one input are one product, ``qkv``, with a kernel
    ``[hidden_size, G, H / G + 2, depth]``: for each of ``G`` groups the queries that share a key
    and a value, then these two. So the dimension of the groups can be sharded over devices. Of two
    inputs there are two products, ``query`` and ``kv``, and only the queries' input is normalised.

    Args:
      hidden_size, num_attention_heads, num_gqa_groups, attention_dropout, attention_products: see
        `TransformerLayer`.
      norm: the arguments of `LayerNormLinear` for the normalisation.
      dense: the arguments of `LinearGeneral` for all products.
      rotary: those of `jfp8.layers.transformer_math.rotary_embedding`, or None for no embedding.
      encoded_features: features of the second input; None: there is none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int,
        *,
        norm: dict[str, Any],
        dense: dict[str, Any],
        attention_dropout: float = 0.0,
        attention_products: bool = False,
        rotary: dict[str, Any] | None = None,
        encoded_features: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        heads, groups = num_attention_heads, num_gqa_groups
        depth, shared_by = hidden_size // heads, heads // groups
        projected = partial(LayerNormLinear, hidden_size, **norm, **dense, rngs=rngs)
        self.heads, self.shared_by = heads, shared_by
        self.rotary = None if rotary is None else tuple(sorted(rotary.items()))
        self.crossing = encoded_features is not None
        if encoded_features is None:
            self.qkv = projected((groups, shared_by + 2, depth))
        else:
            self.query = projected((groups, shared_by, depth))
            self.kv = LinearGeneral(encoded_features, (groups, 2, depth), **dense, rngs=rngs)
        self.saved_activations = norm.get("saved_activations")
        self.dropout_rate = attention_dropout
        self.dropout = dropout_or_none(attention_dropout, rngs)
        how: dict[str, Any] = {name: dense.get(name) for name in ("recipe", "implementation")}
        self.scores = nnx.data(EinsumOp(**how) if attention_products else None)
        self.context = nnx.data(EinsumOp(**how) if attention_products else None)
        self.out = LinearGeneral((heads, depth), hidden_size, axis=(-2, -1), **dense, rngs=rngs)

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """``[..., q, hidden_size]``, from `inputs` of that shape and, if made for it, `encoded`."""
        if self.crossing:
            assert encoded is not None  # the layer has checked
            query, keys_values = self.query(inputs), self.kv(encoded)
        else:
            query, keys_values = jnp.split(self.qkv(inputs), [self.shared_by], axis=-2)
        query = query.reshape(*inputs.shape[:-1], self.heads, -1)
        key, value = keys_values[..., 0, :], keys_values[..., 1, :]
        if self.rotary is not None:
            rotated = partial(transformer_math.rotary_embedding, **dict(self.rotary))
            query, key = rotated(query), rotated(key)

        context = transformer_math.grouped_query_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            dropout=partial(transformer_math.drop, rate=self.dropout_rate),
            dropout_args=(self._dropout_key(deterministic),),
            scores_einsum=jnp.einsum if self.scores is None else self.scores,
            context_einsum=jnp.einsum if self.context is None else self.context,
            saved_activations=self.saved_activations,
        )
        return self.out(context)

    def _dropout_key(self, deterministic: bool | None) -> jax.Array | None:
        """What the ``nnx.Dropout`` would draw its numbers by; None: nothing is dropped."""
        if self.dropout is None:
            return None
        fixed = self.dropout.deterministic if deterministic is None else deterministic
        return None if fixed else self.dropout.rngs()


class TransformerLayer(nnx.Module):
    """A layer of a Transformer: attention, attention to an encoder's output, and an MLP. ::

        x = x + dropout(attention(normalize(x)))
        x = x + dropout(attention(normalize(x), encoded))      in a decoder
        x = x + dropout(mlp(normalize(x)))

    All products with weights are in FP8: ``qkv`` and ``out`` of the attentions (``query``, ``kv``
    and ``out`` of the second), ``wi`` and ``wo`` of the MLP. A normalised input is quantized once
    for all that read it. The two products of attention itself stay in high precision, unless
    `attention_products` is set. The parameters are those of `jfp8.linen.TransformerLayer`.

    There is no cache for decoding step by step. Dropout follows ``model.eval()`` and
    ``model.train()``, as everywhere in NNX.

    Args:
      hidden_size: features of the input and the result.
      mlp_hidden_size: features within the MLP.
      num_attention_heads: heads, a divisor of `hidden_size`.
      num_gqa_groups: heads of keys and values, each shared by a group of queries' heads; None: as
        many as `num_attention_heads`; 1: multi-query attention.
      layer_type: ``"encoder"``, or ``"decoder"`` with attention to an encoder's output. A layer of
        a decoder-only model is an ``"encoder"`` with ``self_attn_mask_type="causal"``.
      encoded_features: features of the encoder's output; None: `hidden_size`.
      self_attn_mask_type: ``"causal"`` or ``"no_mask"``; None: causal in a decoder. A mask given to
        the call holds besides.
      layernorm_type, layernorm_epsilon, zero_centered_gamma: see `LayerNormLinear`.
      mlp_activation: see `LayerNormMLP`.
      hidden_dropout, attention_dropout, intermediate_dropout: rates of dropout of what is added to
        the residual, of attention's weights, and within the MLP.
      enable_rotary_pos_emb: turn queries and keys of the self attention by their positions.
      rotary_pos_emb_windows, rotary_pos_emb_group_method: see
        `jfp8.layers.transformer_math.rotary_embedding`.
      enable_relative_embedding: add `RelativePositionBiases` to the scores of the self attention.
      use_bias, dtype, param_dtype, kernel_init, bias_init: of all products; see
        ``flax.nnx.Linear``.
      attention_products: also compute the two products of attention itself in FP8.
      saved_activations: keep what the backward pass needs beside the operands of FP8 products in
        this format; see `jfp8.linen.TransformerLayer`.
      recipe, implementation: see `Linear`.
      rngs: stream ``params`` for initial values, ``dropout`` for dropout.

    Raises:
      ValueError: a name that is unknown, or sizes that do not fit.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.TransformerLayer(8, 32, num_attention_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 8))).shape
    (1, 5, 8)
    """

    def __init__(
        self,
        hidden_size: int = 512,
        mlp_hidden_size: int = 2048,
        num_attention_heads: int = 8,
        num_gqa_groups: int | None = None,
        *,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        encoded_features: int | None = None,
        self_attn_mask_type: Literal["causal", "no_mask"] | None = None,
        layernorm_type: LayerNormType = "layernorm",
        layernorm_epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        mlp_activation: str = "gelu",
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        intermediate_dropout: float = 0.0,
        enable_rotary_pos_emb: bool = False,
        rotary_pos_emb_windows: tuple[float, float] = (1, 10_000),
        rotary_pos_emb_group_method: GroupMethod = "consecutive",
        enable_relative_embedding: bool = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        attention_products: bool = False,
        saved_activations: Format | None = None,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("layer_type", layer_type, ("encoder", "decoder"))
        check_choice("self_attn_mask_type", self_attn_mask_type, ("causal", "no_mask", None))
        heads, groups = num_attention_heads, num_gqa_groups or num_attention_heads
        if hidden_size % heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_attention_heads={heads}, "
                "which share it."
            )
        if groups < 1 or heads % groups:
            raise ValueError(
                f"num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}: each "
                "group of queries shares one head of keys and values."
            )
        if layer_type == "encoder" and encoded_features is not None:
            raise ValueError(
                'encoded_features is for layer_type="decoder", which attends to an encoder.'
            )
        self.hidden_size, self.layer_type = hidden_size, layer_type
        self.causal = (self_attn_mask_type or "no_mask") == "causal"
        if self_attn_mask_type is None:
            self.causal = layer_type == "decoder"

        norm: dict[str, Any] = {
            "layernorm_type": layernorm_type,
            "epsilon": layernorm_epsilon,
            "zero_centered_gamma": zero_centered_gamma,
            "saved_activations": saved_activations,
        }
        dense: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "recipe": recipe,
            "implementation": implementation,
        }
        attention = partial(
            LayerNormAttention,
            hidden_size,
            heads,
            groups,
            norm=norm,
            dense=dense,
            attention_dropout=attention_dropout,
            attention_products=attention_products,
            rngs=rngs,
        )
        self.relpos_bias = nnx.data(None)
        if enable_relative_embedding:
            self.relpos_bias = RelativePositionBiases(
                heads, param_dtype=param_dtype, dtype=dtype, rngs=rngs
            )
        rotary = {
            "windows": rotary_pos_emb_windows,
            "group_method": rotary_pos_emb_group_method,
        }
        self.self_attention = attention(rotary=rotary if enable_rotary_pos_emb else None)
        self.encoder_decoder_attention = nnx.data(None)
        if layer_type == "decoder":
            features = hidden_size if encoded_features is None else encoded_features
            self.encoder_decoder_attention = attention(encoded_features=features)
        self.mlp = LayerNormMLP(
            hidden_size,
            mlp_hidden_size,
            activation=mlp_activation,
            intermediate_dropout_rate=intermediate_dropout,
            **norm,
            **dense,
            rngs=rngs,
        )
        self.dropout = dropout_or_none(hidden_dropout, rngs)

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        *,
        attention_bias: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[..., length, hidden_size]``.
          encoded: the encoder's output, ``[..., encoded_length, encoded_features]``; for a decoder
            only.
          attention_mask: bool, broadcast to ``[..., heads, length, length]``: True where a query
            may attend to a key, as Flax's masks (Transformer Engine's say the opposite).
          encoder_decoder_mask: likewise, ``[..., heads, length, encoded_length]``.
          attention_bias: added to the scores of the self attention; broadcast likewise.
          deterministic: no dropout; None: what ``model.eval()`` and ``model.train()`` set.

        Returns:
          Array of the shape and dtype of `inputs`.
        """
        self._check(inputs, encoded, encoder_decoder_mask)
        length = inputs.shape[-2]
        mask, bias = attention_mask, attention_bias
        if self.causal:
            earlier = transformer_math.causal_mask(length, length)
            earlier = earlier.reshape((1,) * (inputs.ndim - 1) + earlier.shape)
            mask = earlier if mask is None else jnp.logical_and(earlier, mask)
        if self.relpos_bias is not None:
            biases = self.relpos_bias(length, length, bidirectional=not self.causal)
            bias = biases if bias is None else biases + bias

        def plus(x: jax.Array, y: jax.Array) -> jax.Array:
            if self.dropout is not None:
                y = self.dropout(y, deterministic=deterministic)
            return x + y.astype(x.dtype)

        how = {"deterministic": deterministic}
        x = plus(inputs, self.self_attention(inputs, mask=mask, bias=bias, **how))
        if self.encoder_decoder_attention is not None:
            y = self.encoder_decoder_attention(x, encoded, mask=encoder_decoder_mask, **how)
            x = plus(x, y)
        return plus(x, self.mlp(x, **how))

    def _check(
        self, inputs: jax.Array, encoded: jax.Array | None, encoder_decoder_mask: jax.Array | None
    ) -> None:
        if inputs.ndim < 2 or inputs.shape[-1] != self.hidden_size:
            raise ValueError(
                f"inputs must be [..., length, hidden_size={self.hidden_size}]; got {inputs.shape}."
            )
        if self.layer_type == "decoder" and encoded is None:
            raise ValueError(
                'layer_type="decoder" attends to an encoder\'s output: give `encoded` to the call. '
                'For a decoder-only model use layer_type="encoder" with '
                'self_attn_mask_type="causal".'
            )
        if self.layer_type == "encoder" and not (encoded is None and encoder_decoder_mask is None):
            raise ValueError(
                '`encoded` and `encoder_decoder_mask` are for layer_type="decoder"; this layer is '
                'an "encoder" and would ignore them.'
            )
