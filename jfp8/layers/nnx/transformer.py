"""A whole Transformer layer, encoder or decoder, with all its projections in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jfp8.layers import position_math, transformer_math
from jfp8.layers.attention import attend
from jfp8.layers.kv_cache import NAMES, KVCache, init_kv_cache
from jfp8.layers.nnx.attention import DotProductAttention
from jfp8.layers.nnx.fused import LayerNormLinear, LayerNormMLP, dropout_or_none
from jfp8.layers.nnx.kv_cache import read_cache, write_cache
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.nnx.signatures import ExplicitModule
from jfp8.layers.position_math import Rotary
from jfp8.layers.transformer_options import TransformerOptions
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.scaling.formats import FormatLike

default_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform")


class RelativePositionBiases(ExplicitModule):
    """A learned bias of attention scores for each head and distance, as in T5.

    Args:
      num_attention_heads, num_buckets, max_distance, embedding_init, dtype, param_dtype: as for
        `jfp8.linen.RelativePositionBiases`, whose parameter it has.
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

    def __call__(
        self,
        query_length: int,
        key_length: int,
        bidirectional: bool = True,
        position: jax.Array | None = None,
    ) -> jax.Array:
        """See `jfp8.linen.RelativePositionBiases`."""
        return position_math.relative_position_bias(
            self.rel_embedding.get_value().astype(self.dtype),
            query_length,
            key_length,
            bidirectional=bidirectional,
            max_distance=self.max_distance,
            position=position,
        )[None]


class LayerNormAttention(nnx.Module):
    """Normalisation, attention of grouped queries and its projections: a part of a layer.

    See `jfp8.layers.linen.transformer.LayerNormAttention` for its parameters and arguments.

    Args:
      encoded_features: features of the second input, or None if there is none.
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
        attention_sinks: bool = False,
        rotary: Rotary | None = None,
        encoded_features: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        heads, groups = num_attention_heads, num_gqa_groups
        depth, shared_by = hidden_size // heads, heads // groups
        projected = partial(LayerNormLinear, hidden_size, **norm, **dense, rngs=rngs)
        self.shared_by = shared_by
        self.rotary = rotary
        if encoded_features is None:
            self.qkv = projected((groups, shared_by + 2, depth))
        else:
            self.query = projected((groups, shared_by, depth))
            self.kv = LinearGeneral(encoded_features, (groups, 2, depth), **dense, rngs=rngs)
        self.saved_activations = norm["saved_activations"]
        self.dropout_rate = attention_dropout
        self.dropout = dropout_or_none(attention_dropout, rngs)
        how: dict[str, Any] = {name: dense[name] for name in ("recipe", "implementation")}
        self.attention = nnx.data(DotProductAttention(**how) if attention_products else None)
        self.implementation = dense["implementation"]
        sinks = nnx.Param(jnp.zeros(heads, dense["param_dtype"])) if attention_sinks else None
        self.sinks = nnx.data(sinks)
        self.out = LinearGeneral((heads, depth), hidden_size, axis=(-2, -1), **dense, rngs=rngs)

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        **options: Any,
    ) -> tuple[jax.Array, KVCache | None]:
        """See `jfp8.layers.linen.transformer.LayerNormAttention.__call__`."""
        qkv = None
        if encoded is None:
            qkv = self.qkv(inputs)
            query, keys_values = jnp.split(qkv, [self.shared_by], axis=-2)
        else:
            query, keys_values = self.query(inputs), self.kv(encoded)
        if self.sinks is not None:
            options["sinks"] = self.sinks.get_value()
        own = self.attention
        in_fp8 = own is not None and recipe_in_effect(own.recipe, own.path) is not None
        plain = partial(attend, recipe=None, implementation=self.implementation)
        context, cache = transformer_math.projected_attention(
            query,
            keys_values,
            attention=own._attend if in_fp8 else plain,
            in_fp8=in_fp8,
            qkv=qkv,
            rotary=self.rotary,
            cache=cache,
            dropout_rate=self.dropout_rate,
            dropout_key=self._dropout_key(deterministic),
            saved_activations=self.saved_activations,
            **options,
        )
        return self.out(context), cache

    def _dropout_key(self, deterministic: bool | None) -> jax.Array | None:
        if self.dropout is None:
            return None
        fixed = self.dropout.deterministic if deterministic is None else deterministic
        return None if fixed else self.dropout.rngs()


@dataclass(eq=False, repr=False)
class TransformerLayer(TransformerOptions, ExplicitModule):
    """A layer of a Transformer: attention, attention to an encoder's output, and an MLP.

    It computes what `jfp8.linen.TransformerLayer` does, with the same parameters. Dropout follows
    ``model.eval()`` and ``model.train()``, as everywhere in NNX.

    Args:
      encoded_features: features of the encoder's output; None means `hidden_size`.
      rngs: stream ``params`` for initial values, ``dropout`` for dropout. For the others see
        `jfp8.linen.TransformerLayer`.

    Raises:
      ValueError: a choice that is unknown, or sizes that do not fit.
      TypeError: an unknown option; the message lists the known ones.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.TransformerLayer(8, 32, num_attention_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 8))).shape
    (1, 5, 8)
    """

    _: KW_ONLY
    encoded_features: InitVar[int | None] = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, encoded_features: int | None, rngs: nnx.Rngs) -> None:
        self.check_options()
        if self.layer_type == "encoder" and encoded_features is not None:
            raise ValueError(
                'encoded_features is for layer_type="decoder", which attends to an encoder.'
            )
        self.relpos_bias = nnx.data(None)
        if self.enable_relative_embedding:
            self.relpos_bias = RelativePositionBiases(
                self.num_attention_heads, param_dtype=self.param_dtype, dtype=self.dtype, rngs=rngs
            )
        size = self.hidden_size
        attention = partial(LayerNormAttention, size, **self.attention_options(), rngs=rngs)
        self.self_attention = attention(rotary=self.rotary())
        self.encoder_decoder_attention = nnx.data(None)
        if self.layer_type == "decoder":
            features = size if encoded_features is None else encoded_features
            self.encoder_decoder_attention = attention(encoded_features=features)
        self.mlp = LayerNormMLP(size, self.mlp_hidden_size, **self.mlp_options(), rngs=rngs)
        self.dropout = dropout_or_none(self.hidden_dropout, rngs)
        self.decode = False
        for name in NAMES:
            setattr(self, name, nnx.data(None))

    def init_cache(self, input_shape: Sequence[int], dtype: FormatLike = jnp.float32) -> None:
        """Make an empty cache of keys and values for the self attention.

        Args:
          input_shape: ``(..., max_length, hidden_size)``.
          dtype: a wide dtype, or an FP8 format such as ``jnp.float8_e4m3fn``, with an f32 scale for
            each token and head.

        Raises:
          ValueError: the self attention is not causal.
        """
        self.check_decodes()
        write_cache(self, init_kv_cache(self.kv_cache_shape(input_shape), dtype))

    def _cache(self, decode: bool | None) -> KVCache | None:
        """Return the keys and values of earlier tokens; None if they are not asked for."""
        if not (self.decode if decode is None else decode):
            return None
        cache = read_cache(self)
        if cache is None:
            raise ValueError(
                "decode=True needs a cache. Make one for the longest sequence: "
                "layer.init_cache((batch, max_length, hidden_size))."
            )
        return cache

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        *,
        attention_bias: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decode: bool | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[..., length, hidden_size]``.
          encoded: ``[..., encoded_length, encoded_features]``; for a decoder only.
          attention_mask, encoder_decoder_mask, attention_bias, segment_ids: as for
            `jfp8.linen.TransformerLayer`.
          decode: `inputs` are the next positions after those in the cache (see `init_cache`); None:
            what ``model.set_attributes(decode=...)`` has set, or else False.
          deterministic: no dropout; None takes the setting of ``model.eval()`` or ``train()``.

        Returns:
          Array of the shape and dtype of `inputs`.
        """
        self._check_inputs(inputs, encoded, encoder_decoder_mask)
        cache = self._cache(decode)
        length, bias = inputs.shape[-2], attention_bias
        seen = self._seen_keys(attention_mask, segment_ids, length, cache)
        if self.relpos_bias is not None:
            keys = length if cache is None else cache.max_length
            first = None if cache is None else cache.index
            relative = self.relpos_bias(length, keys, not self.is_causal, first)
            bias = transformer_math.plus_bias(relative, bias)

        def plus(x: jax.Array, y: jax.Array) -> jax.Array:
            if self.dropout is not None:
                y = self.dropout(y, deterministic=deterministic)
            return transformer_math.residual_sum(x, y)

        how = {"deterministic": deterministic}
        y, cache = self.self_attention(inputs, bias=bias, cache=cache, **how, **seen)
        if cache is not None:
            write_cache(self, cache)
        x = plus(inputs, y)
        if self.encoder_decoder_attention is not None:
            y, _ = self.encoder_decoder_attention(x, encoded, mask=encoder_decoder_mask, **how)
            x = plus(x, y)
        return plus(x, self.mlp(x, **how))
