"""Options of Transformer layers, for Linen and NNX alike: names, defaults, checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jfp8.layers.norm_math import LayerNormType
from jfp8.layers.options import PRODUCT_OPTIONS, check_option, options_of
from jfp8.layers.position_math import GroupMethod, Rotary
from jfp8.matmul.spec import Implementation
from jfp8.recipes.registry import RecipeLike
from jfp8.scaling.formats import Format


# Modules inherit from these classes, so they are neither frozen nor compared: Flax does both.
@dataclass(eq=False, repr=False)
class InFeatures:
    """The first option of a block of NNX: features of its inputs, from which Linen reads them."""

    in_features: int


@dataclass(eq=False, repr=False)
class FeedForward:
    """Sizes of a feed-forward block; see `jfp8.linen.LayerNormMLP`."""

    intermediate_dim: int
    activation: str = "gelu"
    intermediate_dropout_rate: float = 0.0


@dataclass(eq=False, repr=False)
class FeedForwardOptions(FeedForward):
    """All options of a feed-forward block; see `jfp8.linen.LayerNormMLP`."""

    layernorm_type: LayerNormType = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = jax.nn.initializers.lecun_normal()
    bias_init: Initializer = jax.nn.initializers.zeros
    return_layernorm_output: bool = False
    saved_activations: Format | None = None
    recipe: RecipeLike | None = None
    implementation: Implementation = None


@dataclass(eq=False, repr=False)
class BiasOptions:
    """All options of `jfp8.linen.RelativePositionBiases`."""

    num_attention_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    embedding_init: Initializer = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32


@dataclass(eq=False, repr=False)
class Architecture:
    """Options of a Transformer layer; see `jfp8.linen.TransformerLayer` for each."""

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layer_type: Literal["encoder", "decoder"] = "encoder"
    self_attn_mask_type: Literal["causal", "no_mask"] | None = None
    layernorm_type: LayerNormType = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    mlp_activation: str = "gelu"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    intermediate_dropout: float = 0.0
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[float, float] = (1, 10_000)
    rotary_pos_emb_group_method: GroupMethod = "consecutive"
    enable_relative_embedding: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = jax.nn.initializers.lecun_normal()
    bias_init: Initializer = jax.nn.initializers.zeros


@dataclass(eq=False, repr=False)
class TransformerOptions(Architecture):
    """All options of a Transformer layer, and what follows from them."""

    attention_products: bool = False
    saved_activations: Format | None = None
    recipe: RecipeLike | None = None
    implementation: Implementation = None
    _: KW_ONLY
    local_window_size: int | tuple[int, int] | None = None
    attention_sinks: bool = False

    def check_options(self) -> None:
        """Raise ``ValueError`` for an unknown name, or sizes that do not fit."""
        check_option("layer_type", self.layer_type, ("encoder", "decoder"))
        mask_types = ("causal", "no_mask", None)
        check_option("self_attn_mask_type", self.self_attn_mask_type, mask_types)
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        if self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={heads}, which share it."
            )
        if groups is not None and (groups < 1 or heads % groups):
            raise ValueError(
                f"num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}: each "
                "group of queries shares one head of keys and values."
            )

    # Flax's `nnx.tabulate` traces the methods without an underscore, as if they computed a layer.
    def _check_inputs(
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

    @property
    def is_causal(self) -> bool:
        """Return whether no query of the self attention may attend to a later key."""
        if self.self_attn_mask_type is None:
            return self.layer_type == "decoder"
        return self.self_attn_mask_type == "causal"

    def check_decodes(self) -> None:
        """Raise ``ValueError`` if the layer attends to tokens that decoding does not have yet."""
        if not self.is_causal:
            raise ValueError(
                "decode=True needs a causal self attention: a token cannot attend to tokens that "
                'come later. Pass self_attn_mask_type="causal".'
            )

    def kv_cache_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the keys of inputs ``[..., length, hidden_size]``."""
        groups = self.num_gqa_groups or self.num_attention_heads
        return (*input_shape[:-1], groups, self.hidden_size // self.num_attention_heads)

    def normalization(self) -> dict[str, Any]:
        names = "layernorm_type", "zero_centered_gamma", "saved_activations"
        return {"epsilon": self.layernorm_epsilon, **options_of(self, names)}

    def attention_options(self) -> dict[str, Any]:
        names = "num_attention_heads", "attention_dropout", "attention_products", "attention_sinks"
        return {
            "num_gqa_groups": self.num_gqa_groups or self.num_attention_heads,
            "norm": self.normalization(),
            "dense": options_of(self, PRODUCT_OPTIONS),
            **options_of(self, names),
        }

    def mlp_options(self) -> dict[str, Any]:
        return {
            "activation": self.mlp_activation,
            "intermediate_dropout_rate": self.intermediate_dropout,
            **self.normalization(),
            **options_of(self, PRODUCT_OPTIONS),
        }

    def rotary(self) -> Rotary | None:
        """Return the rotary embedding of the self attention."""
        if not self.enable_rotary_pos_emb:
            return None
        return self.rotary_pos_emb_windows, self.rotary_pos_emb_group_method
