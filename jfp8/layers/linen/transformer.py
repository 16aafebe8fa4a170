"""A whole Transformer layer, encoder or decoder, with all its projections in FP8."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfp8.layers.kv_cache import KVCache
from jfp8.layers.linen import fused
from jfp8.layers.linen.dot_product_attention import DotProductAttention
from jfp8.layers.linen.kv_cache import read_cache, write_cache
from jfp8.layers.linen.nnx_blocks import block_in
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.nnx import attention as nnx_attention
from jfp8.layers.nnx import kv_cache as nnx_kv_cache
from jfp8.layers.nnx import transformer as nnx_transformer
from jfp8.layers.position_math import Rotary
from jfp8.layers.transformer_options import Architecture, BiasOptions, TransformerOptions
from jfp8.scaling.formats import FormatLike


class RelativePositionBiases(BiasOptions, nn.Module):
    """A learned bias of attention scores for each head and distance, as in T5.

    The ``params`` are ``rel_embedding``, ``[num_attention_heads, num_buckets]``. T5 shares one
    among all layers: give its result to each as ``attention_bias``.

    Attributes:
      num_attention_heads: heads of the query.
      num_buckets, max_distance: see `jfp8.layers.position_math.relative_position_buckets`.
      embedding_init: initializer of the table.
      dtype: dtype of the result; None means `param_dtype`.
      param_dtype: dtype of the table.
    """

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
        block = block_in(self, nnx_transformer.RelativePositionBiases, {})
        return block(query_length, key_length, bidirectional, position)


class LayerNormAttention(nn.Module):
    """Attention with its projections; see `jfp8.layers.nnx.transformer.LayerNormAttention`."""

    num_attention_heads: int
    num_gqa_groups: int
    norm: dict[str, Any]
    dense: dict[str, Any]
    attention_dropout: float = 0.0
    attention_products: bool = False
    attention_sinks: bool = False
    rotary: Rotary | None = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"

    @nn.compact
    def __call__(
        self, inputs: jax.Array, encoded: jax.Array | None = None, **options: Any
    ) -> tuple[jax.Array, KVCache | None]:
        sizes = {"hidden_size": inputs.shape[-1]}
        if encoded is not None:
            sizes["encoded_features"] = encoded.shape[-1]
        block = block_in(self, nnx_transformer.LayerNormAttention, KINDS, **sizes)
        return block(inputs, encoded, **options)


# A field of Linen's alone, at its place among those that may be given by position.
@dataclass(eq=False, repr=False)
class _LinenArchitecture(Architecture):
    deterministic: bool | None = None
    _: KW_ONLY
    state_collection: StateCollection = "fp8"
    decode: bool = False
    cache_dtype: FormatLike | None = None


class TransformerLayer(TransformerOptions, _LinenArchitecture, nn.Module):
    """A layer of a Transformer: attention, attention to an encoder's output, and an MLP. ::

        x = x + dropout(attention(normalize(x)))
        x = x + dropout(attention(normalize(x), encoded))      in a decoder
        x = x + dropout(mlp(normalize(x)))

    All products with weights are in FP8: ``qkv`` and ``out`` of the attentions (``query``, ``kv``
    and ``out`` of the second), ``wi`` and ``wo`` of the MLP. A normalized input is quantized once
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
      use_bias, dtype, param_dtype, kernel_init, bias_init: for all matmuls; see
        ``flax.linen.Dense``.
      deterministic: no dropout; may be given to the call instead.
      attention_products: also compute attention itself in FP8, by `DotProductAttention`.
        `attention_dropout` must then be 0 in training. Attention of all modes has no array of
        ``[length, length]``, unless its weights are dropped, and is 0 for a query that sees no key.
      saved_activations: keep in this format what the backward pass needs besides the operands of
        FP8 matmuls: inputs of normalizations and of the activation, and the values of attention.
        None keeps all of these in high precision. See `jfp8.save_in_fp8`.
      recipe, implementation, state_collection: see `Dense`.
      local_window_size: keys that a query of the self attention sees before and after its own
        position, as in ``jax.nn.dot_product_attention``; None means all.
      attention_sinks: add a parameter ``sinks``, f32[heads], to each attention: a logit that the
        softmax has in its denominator next to the keys' logits, as in gpt-oss. It begins as 0.
      decode: the self attention keeps keys and values in the collection ``cache``. ``init`` with
        inputs of the longest length makes it; ``apply(..., mutable=["cache"])`` then takes the next
        positions, one or several. Past that length results are NaN.
      cache_dtype: dtype of these keys and values: a wide dtype, or an FP8 format such as
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
        block = block_in(self, nnx_transformer.TransformerLayer, KINDS)
        rates = (self.hidden_dropout, self.attention_dropout, self.intermediate_dropout)
        # Only asked for if there is any dropout.
        fixed = not any(rates) or nn.merge_param("deterministic", self.deterministic, deterministic)
        cache = self._cache(inputs)
        if cache is not None:
            nnx_kv_cache.write_cache(block, cache)
        arrays = {"attention_bias": attention_bias, "segment_ids": segment_ids}
        how = {"decode": cache is not None, "deterministic": fixed}
        y = block(inputs, encoded, attention_mask, encoder_decoder_mask, **arrays, **how)
        cache = nnx_kv_cache.read_cache(block)
        if cache is not None:
            write_cache(self, cache)
        return y

    @nn.nowrap
    def _cache(self, inputs: jax.Array) -> KVCache | None:
        """Return the keys and values of earlier tokens; None if there are none, or not yet."""
        if not self.decode:
            return None
        self.check_decodes()
        dtype = self.cache_dtype or self.dtype or jnp.result_type(inputs, self.param_dtype)
        return read_cache(self, self.kv_cache_shape(inputs.shape), dtype)


KINDS = {
    **fused.KINDS,
    nnx_attention.DotProductAttention: DotProductAttention,
    nnx_transformer.LayerNormAttention: LayerNormAttention,
    nnx_transformer.LayerNormMLP: fused.LayerNormMLP,
    nnx_transformer.RelativePositionBiases: RelativePositionBiases,
}
