"""A whole Transformer layer, encoder or decoder, with all its projections in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jfp8.layers import position_math, transformer_math
from jfp8.layers.kv_cache import NAMES, KVCache, init_kv_cache
from jfp8.layers.nnx.attention import DotProductAttention
from jfp8.layers.nnx.fused import LayerNormLinear, LayerNormMLP
from jfp8.layers.nnx.kv_cache import read_cache, write_cache
from jfp8.layers.nnx.layers import LinearGeneral
from jfp8.layers.nnx.parts import Parts
from jfp8.layers.nnx.signatures import ExplicitModule
from jfp8.layers.options import options_of
from jfp8.layers.position_math import Rotary
from jfp8.layers.transformer_options import BiasOptions, TransformerOptions
from jfp8.scaling.formats import FormatLike


@dataclass(eq=False, repr=False)
class RelativePositionBiases(BiasOptions, ExplicitModule):
    """A learned bias of attention scores for each head and distance, as in T5.

    Args:
      rngs: stream ``params`` for initial values. For the others see
        `jfp8.linen.RelativePositionBiases`, whose parameter it has.
    """

    _: KW_ONLY
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        shape = (self.num_attention_heads, self.num_buckets)
        make = Parts.of(rngs).parameter
        self.rel_embedding = make("rel_embedding", self.embedding_init, shape, self.param_dtype)

    def __call__(
        self,
        query_length: int,
        key_length: int,
        bidirectional: bool = True,
        position: jax.Array | None = None,
    ) -> jax.Array:
        """See `jfp8.linen.RelativePositionBiases`."""
        return position_math.relative_position_bias(
            self.rel_embedding.get_value().astype(self.dtype or self.param_dtype),
            query_length,
            key_length,
            bidirectional=bidirectional,
            max_distance=self.max_distance,
            position=position,
        )[None]


class LayerNormAttention(ExplicitModule):
    """Normalization, attention of grouped queries and its projections: a part of a layer.

    Queries, keys and values of one input are one product, ``qkv``, with a kernel
    ``[hidden_size, G, H / G + 2, depth]``: for each of ``G`` groups the queries that share a key
    and a value, then these two. So the dimension of the groups can be sharded over devices. With
    two inputs there are two products, ``query`` and ``kv``; only the queries' input is normalized.

    Args:
      norm: the arguments of `LayerNormLinear` for the normalization.
      dense: the arguments of `LinearGeneral` for all products.
      encoded_features: features of the second input, or None if there is none. For the others see
        `jfp8.linen.TransformerLayer` and `projected_attention`.
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
        heads, groups, parts = num_attention_heads, num_gqa_groups, Parts.of(rngs)
        depth, shared_by = hidden_size // heads, heads // groups
        projected = partial(parts.layer, LayerNormLinear, **norm, **dense)
        linear = partial(parts.layer, LinearGeneral, **dense)
        self.shared_by = shared_by
        self.rotary = rotary
        if encoded_features is None:
            self.qkv = projected("qkv", hidden_size, (groups, shared_by + 2, depth))
        else:
            self.query = projected("query", hidden_size, (groups, shared_by, depth))
            self.kv = linear("kv", encoded_features, (groups, 2, depth))
        self.saved_activations = norm["saved_activations"]
        self.dropout_rate = attention_dropout
        self.dropout = parts.dropout(attention_dropout)
        self.attention = self.sinks = nnx.data(None)
        if attention_products:
            in_fp8 = parts.bare(DotProductAttention, "attention", recipe=dense["recipe"])
            self.attention = nnx.data(in_fp8)
        if attention_sinks:
            zeros, dtype = nnx.initializers.zeros, dense["param_dtype"]
            self.sinks = parts.parameter("sinks", zeros, (heads,), dtype, draws=False)
        self.out = linear("out", (heads, depth), hidden_size, axis=(-2, -1))

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        **options: Any,
    ) -> tuple[jax.Array, KVCache | None]:
        """Return ``[..., q, hidden_size]``, and the new `cache` of earlier positions, if any."""
        if encoded is None:
            query, keys_values = jnp.split(self.qkv(inputs), [self.shared_by], axis=-2)
        else:
            query, keys_values = self.query(inputs), self.kv(encoded)
        if self.sinks is not None:
            options["sinks"] = self.sinks.get_value().astype(jnp.float32)
        own = self.attention
        in_fp8 = own is not None and own._is_in_fp8()
        context, cache = transformer_math.projected_attention(
            query,
            keys_values,
            in_fp8=getattr(own, "_attend", own) if in_fp8 else None,
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
        size, parts = self.hidden_size, Parts.of(rngs)
        self.relpos_bias = self.encoder_decoder_attention = nnx.data(None)
        if self.enable_relative_embedding:
            options = options_of(self, ("num_attention_heads", "param_dtype", "dtype"))
            self.relpos_bias = parts.layer(RelativePositionBiases, "relpos_bias", **options)
        attention = partial(parts.layer, LayerNormAttention, **self.attention_options())
        self.self_attention = attention("self_attention", size, rotary=self.rotary())
        if self.layer_type == "decoder":
            other = {"encoded_features": size if encoded_features is None else encoded_features}
            self.encoder_decoder_attention = attention("encoder_decoder_attention", size, **other)
        options = self.mlp_options()
        self.mlp = parts.layer(LayerNormMLP, "mlp", size, self.mlp_hidden_size, **options)
        self.dropout = parts.dropout(self.hidden_dropout)
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
          attention_mask, encoder_decoder_mask, attention_bias, segment_ids: see
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
        if cache is not None and segment_ids is not None:
            raise ValueError(
                "segment_ids are for packed sequences in training, but this call decodes, and the "
                "cache has no segments. Decode the sequences side by side: one in each row."
            )
        if self.relpos_bias is not None:
            keys = length if cache is None else cache.max_length
            first = None if cache is None else cache.index
            relative = self.relpos_bias(length, keys, not self.is_causal, first)
            bias = transformer_math.sum_of_biases(relative, bias)

        def plus(x: jax.Array, y: jax.Array) -> jax.Array:
            if self.dropout is not None:
                y = self.dropout(y, deterministic=deterministic)
            return transformer_math.residual_sum(x, y)

        how = {"deterministic": deterministic}
        seen: dict[str, Any] = {
            "mask": attention_mask,
            "is_causal": self.is_causal,
            "local_window_size": self.local_window_size,
            "tokens": (None, None, segment_ids, segment_ids),
        }
        y, cache = self.self_attention(inputs, bias=bias, cache=cache, **how, **seen)
        if cache is not None:
            write_cache(self, cache)
        x = plus(inputs, y)
        if self.encoder_decoder_attention is not None:
            y, _ = self.encoder_decoder_attention(x, encoded, mask=encoder_decoder_mask, **how)
            x = plus(x, y)
        return plus(x, self.mlp(x, **how))
