"""A whole Transformer layer, encoder or decoder, with all its projections in FP8."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jfp8.layers import position_math, transformer_math
from jfp8.layers.attention import attend
from jfp8.layers.kv_cache import KVCache
from jfp8.layers.linen.dot_product_attention import DotProductAttention
from jfp8.layers.linen.fused import LayerNormDense, LayerNormMLP
from jfp8.layers.linen.kv_cache import read_cache, write_cache
from jfp8.layers.linen.layers import DenseGeneral
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.position_math import Rotary
from jfp8.layers.transformer_options import Architecture, TransformerOptions
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.formats import FormatLike


class RelativePositionBiases(nn.Module):
    """A learned bias of attention scores for each head and distance, as in T5.

    The ``params`` are ``rel_embedding``, ``[num_attention_heads, num_buckets]``. T5 shares one
    among all layers: give its result to each as ``attention_bias``.

    Attributes:
      num_attention_heads: heads of the query.
      num_buckets, max_distance: see `jfp8.layers.position_math.relative_position_buckets`.
      embedding_init: of the table.
      dtype: of the result; None means `param_dtype`.
      param_dtype: of the table.
    """

    num_attention_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    embedding_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        query_length: int,
        key_length: int,
        bidirectional: bool = True,
        position: jax.Array | None = None,
    ) -> jax.Array:
        """Return the biases, ``[1, heads, query_length, key_length]``.

        Args:
          bidirectional: whether keys after a query have separate distances.
          position: int32[], of the first query, if it is not 0.
        """
        shape = (self.num_attention_heads, self.num_buckets)
        table = self.param("rel_embedding", self.embedding_init, shape, self.param_dtype)
        return position_math.relative_position_bias(
            table.astype(self.dtype or self.param_dtype),
            query_length,
            key_length,
            bidirectional=bidirectional,
            max_distance=self.max_distance,
            position=position,
        )[None]


class LayerNormAttention(nn.Module):
    """Normalisation, attention of grouped queries and its projections: a part of a layer.

    Queries, keys and values of one input are one product, ``qkv``, with a kernel
    ``[hidden_size, G, H / G + 2, depth]``: for each of ``G`` groups the queries that share a key
    and a value, then these two. So the dimension of the groups can be sharded over devices. With
    two inputs there are two products, ``query`` and ``kv``; only the queries' input is normalised.

    Attributes:
      norm: the arguments of `LayerNormDense` for the normalisation.
      dense: the arguments of `DenseGeneral` for all products. For the others see
        `TransformerLayer` and `projected_attention`.
    """

    num_attention_heads: int
    num_gqa_groups: int
    norm: dict[str, Any]
    dense: dict[str, Any]
    attention_dropout: float = 0.0
    attention_products: bool = False
    attention_sinks: bool = False
    rotary: Rotary | None = None

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        *,
        cache: KVCache | None = None,
        deterministic: bool = True,
        **options: Any,
    ) -> tuple[jax.Array, KVCache | None]:
        """Return ``[..., q, hidden_size]``, and the new `cache` of earlier positions, if any."""
        hidden_size, heads, groups = inputs.shape[-1], self.num_attention_heads, self.num_gqa_groups
        depth, shared_by = hidden_size // heads, heads // groups
        projected = partial(LayerNormDense, **self.norm, **self.dense)
        qkv = None
        if encoded is None:
            qkv = projected((groups, shared_by + 2, depth), name="qkv")(inputs)
            query, keys_values = jnp.split(qkv, [shared_by], axis=-2)
        else:
            query = projected((groups, shared_by, depth), name="query")(inputs)
            keys_values = DenseGeneral((groups, 2, depth), **self.dense, name="kv")(encoded)

        dropout_key = None
        if self.attention_dropout and not deterministic:
            dropout_key = self.make_rng("dropout")
        if self.attention_sinks:
            zeros, dtype = nn.initializers.zeros, self.dense["param_dtype"]
            options["sinks"] = self.param("sinks", zeros, (heads,), dtype)
        how = {name: self.dense[name] for name in ("recipe", "implementation")}
        own, path = how["recipe"], "/".join((*self.path, "attention"))
        in_fp8 = self.attention_products and recipe_in_effect(own and check_recipe(own), path)
        attention = partial(attend, recipe=None, implementation=how["implementation"])
        if in_fp8:
            attention = DotProductAttention(**how, name="attention")
        context, cache = transformer_math.projected_attention(
            query,
            keys_values,
            attention=attention,
            in_fp8=bool(in_fp8),
            qkv=qkv,
            rotary=self.rotary,
            cache=cache,
            dropout_rate=self.attention_dropout,
            dropout_key=dropout_key,
            saved_activations=self.norm["saved_activations"],
            **options,
        )
        out = DenseGeneral(hidden_size, axis=(-2, -1), **self.dense, name="out")
        return out(context), cache


# A field of Linen's alone, at its place among those that may be given by position.
@dataclass(eq=False, repr=False)
class _Deterministic(Architecture):
    deterministic: bool | None = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"
    decode: bool = False
    cache_dtype: FormatLike | None = None


class TransformerLayer(TransformerOptions, _Deterministic, nn.Module):
    """A layer of a Transformer: attention, attention to an encoder's output, and an MLP. ::

        x = x + dropout(attention(normalize(x)))
        x = x + dropout(attention(normalize(x), encoded))      in a decoder
        x = x + dropout(mlp(normalize(x)))

    All products with weights are in FP8: ``qkv`` and ``out`` of the attentions (``query``, ``kv``
    and ``out`` of the second), ``wi`` and ``wo`` of the MLP. A normalised input is quantized once
    for all that read it. Attention itself stays in high precision, unless `attention_products` is
    set.

    The names are Transformer Engine's where Flax has none. Lift it over a stack with
    ``nn.scan`` and ``nn.remat`` like any layer; give `deterministic` to the constructor then.

    Attributes:
      hidden_size: features of the input and the result.
      mlp_hidden_size: features within the MLP.
      num_attention_heads: heads, a divisor of `hidden_size`.
      num_gqa_groups: heads of keys and values, each shared by a group of queries' heads; None: as
        many as `num_attention_heads`; 1: multi-query attention.
      layer_type: ``"encoder"``, or ``"decoder"`` with attention to an encoder's output. A layer of
        a decoder-only model is an ``"encoder"`` with ``self_attn_mask_type="causal"``.
      self_attn_mask_type: ``"causal"`` or ``"no_mask"``; None: causal in a decoder. A mask given to
        the call applies as well.
      layernorm_type, layernorm_epsilon, zero_centered_gamma: see `LayerNormDense`.
      mlp_activation: see `LayerNormMLP`.
      hidden_dropout, attention_dropout, intermediate_dropout: rates of dropout of what is added to
        the residual, of attention's weights, and within the MLP; random stream ``dropout``.
      enable_rotary_pos_emb: rotate queries and keys of the self attention by their positions.
      rotary_pos_emb_windows, rotary_pos_emb_group_method: see
        `jfp8.layers.position_math.rotary_embedding`.
      enable_relative_embedding: add `RelativePositionBiases` to the scores of the self attention.
      use_bias, dtype, param_dtype, kernel_init, bias_init: of all products; see
        ``flax.linen.Dense``.
      deterministic: no dropout; may be given to the call instead.
      attention_products: also compute attention itself in FP8, by `DotProductAttention`.
        `attention_dropout` must then be 0 in training. Attention of all modes has no array of
        ``[length, length]``, unless its weights are dropped, and is 0 for a query that sees no key.
      saved_activations: keep in this format what the backward pass needs besides the operands of
        FP8 matmuls: inputs of normalisations and of the activation, and the values of attention.
        None keeps all of these in high precision. See `jfp8.save_in_fp8`.
      recipe, implementation, state_collection: see `Dense`.
      local_window_size: keys that a query of the self attention sees before and after its own
        position, as in ``jax.nn.dot_product_attention``; None means all.
      attention_sinks: add a parameter ``sinks``, f32[heads], to each attention: a logit that the
        softmax has in its denominator next to the keys' logits, as in gpt-oss. It begins as 0.
      decode: the self attention keeps keys and values in the collection ``cache``. ``init`` with
        inputs of the longest length makes it; ``apply(..., mutable=["cache"])`` then takes the next
        positions, one or several. Past that length results are NaN.
      cache_dtype: of these keys and values: a wide dtype, or an FP8 format such as
        ``jnp.float8_e4m3fn``, with an f32 scale for each token and head. None means the layer's.

    Raises:
      ValueError: a name that is unknown, sizes that do not fit, `decode` without a causal mask or a
        cache, or dropout of attention's weights with `attention_products`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> layer = jfp8.linen.TransformerLayer(8, 32, num_attention_heads=2)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 5, 8)))
    >>> sorted(variables["params"]), sorted(variables["params"]["self_attention"])
    (['mlp', 'self_attention'], ['out', 'qkv'])
    """

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        *,
        attention_bias: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Apply the layer.

        Args:
          inputs: ``[..., length, hidden_size]``.
          encoded: the encoder's output, ``[..., encoded_length, any]``; for a decoder only.
          attention_mask: broadcast to ``[..., heads, length, length]``: True or 1 where a query may
            attend to a key, as Flax's masks (Transformer Engine's say the opposite). With a cache,
            ``[..., heads, length, max_length]``, and the bias likewise.
          encoder_decoder_mask: likewise, ``[..., heads, length, encoded_length]``.
          attention_bias: added to the scores of the self attention; broadcast likewise.
          segment_ids: integers ``[..., length]``, for sequences packed into one: in the self
            attention a token sees only those with its own id. Not with a cache.
          deterministic: no dropout; required if there is dropout and the constructor was not told.

        Returns:
          Array of the shape and dtype of `inputs`.
        """
        self.check_options()
        self._check_inputs(inputs, encoded, encoder_decoder_mask)
        rates = (self.hidden_dropout, self.attention_dropout, self.intermediate_dropout)
        # Only asked for if there is any dropout.
        fixed = not any(rates) or nn.merge_param("deterministic", self.deterministic, deterministic)
        where: dict[str, Any] = {"state_collection": self.state_collection}
        options = self.attention_options()
        attention = partial(LayerNormAttention, **options | {"dense": options["dense"] | where})
        cache = self._cache(inputs)
        length, bias = inputs.shape[-2], attention_bias
        seen = self._seen_keys(attention_mask, segment_ids, length, cache)
        if self.enable_relative_embedding:
            relative = RelativePositionBiases(
                self.num_attention_heads,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name="relpos_bias",
            )
            keys = length if cache is None else cache.max_length
            first = None if cache is None else cache.index
            relative = relative(length, keys, not self.is_causal, first)
            bias = transformer_math.plus_bias(relative, bias)

        def plus(x: jax.Array, y: jax.Array) -> jax.Array:
            y = nn.Dropout(self.hidden_dropout, deterministic=fixed)(y)
            return transformer_math.residual_sum(x, y)

        x = inputs
        y, cache = attention(rotary=self.rotary(), name="self_attention")(
            x, bias=bias, cache=cache, deterministic=fixed, **seen
        )
        if cache is not None:
            write_cache(self, cache)
        x = plus(x, y)
        if self.layer_type == "decoder":
            y, _ = attention(name="encoder_decoder_attention")(
                x, encoded, mask=encoder_decoder_mask, deterministic=fixed
            )
            x = plus(x, y)
        options = self.mlp_options() | where
        mlp = LayerNormMLP(self.mlp_hidden_size, deterministic=fixed, **options, name="mlp")
        return plus(x, mlp(x))

    @nn.nowrap
    def _cache(self, inputs: jax.Array) -> KVCache | None:
        """Return the keys and values of earlier tokens; None if there are none, or not yet."""
        if not self.decode:
            return None
        self.check_decodes()
        dtype = self.cache_dtype or self.dtype or jnp.result_type(inputs, self.param_dtype)
        return read_cache(self, self.kv_cache_shape(inputs.shape), dtype)
