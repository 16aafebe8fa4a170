"""Flax's attention with its projections in FP8, and optionally attention itself."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jfp8.layers.attention_math import attend_by, check_weights_stay_inside
from jfp8.layers.kv_cache import init_kv_cache, with_earlier
from jfp8.layers.nnx.hooks import install
from jfp8.layers.nnx.kv_cache import read_cache, write_cache
from jfp8.layers.nnx.products import DotGeneral
from jfp8.layers.nnx.signatures import ExplicitModule, PrintsRecipe
from jfp8.layers.options import replaced
from jfp8.matmul.spec import Implementation
from jfp8.products.shared_input import shared_inputs
from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.formats import Format, FormatLike


class DotProductAttention(PrintsRecipe):
    """``flax.nnx.dot_product_attention`` in FP8, forward and backward.

    For ``nnx.MultiHeadAttention(..., attention_fn=DotProductAttention())``. See
    `jfp8.scaled_dot_product_attention`: its scales are per token, with any recipe. A query
    that sees no key gets 0.

    Args:
      recipe, path: see `Product`.
      implementation: see `jfp8.scaled_dot_product_attention`.
    """

    def __init__(
        self,
        *,
        recipe: RecipeLike | None = None,
        implementation: str | None = None,
        path: str = "",
    ) -> None:
        self.recipe = None if recipe is None else check_recipe(recipe)
        self.implementation = implementation
        self.path = path

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Any = dtypes.promote_dtype,
        is_causal: bool = False,
        **options: Any,
    ) -> jax.Array:
        """See ``flax.nnx.dot_product_attention`` for the arguments.

        Args:
          options: further ones of `jfp8.scaled_dot_product_attention`, but a `state` and `sink`.

        Raises:
          ValueError: dropout, or a `module` that keeps the weights: there are none to drop or keep.
        """
        dropped, kept = 0.0 if deterministic else dropout_rate, module is not None
        if not (self._is_in_fp8() or options) and (dropped or kept):
            dropout = broadcast_dropout, dropout_rng, dropout_rate, deterministic
            how = bias, mask, *dropout, dtype, precision, module, promote_dtype, is_causal
            return nnx.dot_product_attention(query, key, value, *how)
        check_weights_stay_inside(dropped, kept)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return self._attend(query, key, value, bias, mask, is_causal=is_causal, **options)

    # Flax's `nnx.tabulate` has a row for each called method without an underscore.
    def _is_in_fp8(self) -> bool:
        return recipe_in_effect(self.recipe, self.path) is not None

    def _attend(self, *arrays: jax.Array | None, **options: Any) -> jax.Array:
        """Compute `attend` of `attention_math` by the recipe in effect, with one batch axis."""
        options["implementation"] = self.implementation
        with jax.named_scope(self.path) if self.path else contextlib.nullcontext():
            return attend_by(self.recipe, self.path, *arrays, **options)


class AttentionOptions(TypedDict, total=False):
    """Flax's arguments of `MultiHeadAttention` that are given by name."""

    dtype: Dtype | None
    param_dtype: Dtype
    broadcast_dropout: bool
    dropout_rate: float
    deterministic: bool | None
    precision: PrecisionLike
    kernel_init: Initializer
    out_kernel_init: Initializer | None
    bias_init: Initializer
    out_bias_init: Initializer | None
    use_bias: bool
    attention_fn: Callable[..., jax.Array]
    decode: bool | None
    normalize_qk: bool
    qkv_promote_dtype: PromoteDtypeFn
    out_promote_dtype: PromoteDtypeFn
    ln_promote_dtype: PromoteDtypeFn
    rngs: Required[nnx.Rngs]
    keep_rngs: bool
    kernel_metadata: Mapping[str, Any]
    out_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    out_bias_metadata: Mapping[str, Any]
    query_ln_scale_metadata: Mapping[str, Any]
    key_ln_scale_metadata: Mapping[str, Any]


class MultiHeadAttention(ExplicitModule, nnx.MultiHeadAttention):
    """``flax.nnx.MultiHeadAttention`` with its projections, forward and backward, in FP8.

    Takes every argument of ``nnx.MultiHeadAttention`` but those for its products; the ``nnx.Param``
    state is the same, with the same initial values for the same `rngs`. With ``decode=True`` a call
    takes any number of next positions, where Flax's takes one.

    Args:
      recipe, implementation: see `Linear`.
      attention_products: see `jfp8.linen.MultiHeadDotProductAttention`. For the others see
        ``nnx.MultiHeadAttention``.

    Attributes:
      cache_dtype: dtype of every cache of `init_cache`; None means the dtype that it is given.

    Raises:
      ValueError: an argument for a product, or `attention_products` with an ``attention_fn``.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 3, 8))).shape
    (1, 3, 8)
    """

    cache_dtype: np.dtype | Format | None = None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        recipe: RecipeLike | None = None,
        implementation: Implementation = None,
        attention_products: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        sizes = in_features, qkv_features, out_features, num_kv_heads, in_kv_features
        super().__init__(num_heads, *sizes, **options)
        for name in ("query", "key", "value", "out"):
            install(getattr(self, name), recipe=recipe, implementation=implementation)
        if attention_products:
            if not has_stock_attention(self):
                raise ValueError(
                    "attention_products=True computes attention itself in FP8, so "
                    "attention_fn would have no effect. Leave out one of the two."
                )
            install_attention(self, recipe=recipe)

    def init_cache(self, input_shape: Sequence[int], dtype: FormatLike = jnp.float32) -> None:
        """Make an empty cache of keys and values, for ``decode=True``.

        Args:
          input_shape: ``(..., max_length, features)``.
          dtype: a wide dtype, or an FP8 format such as ``jnp.float8_e4m3fn``, with an f32 scale for
            each token and head.
        """
        dtype = dtype if self.cache_dtype is None else self.cache_dtype
        heads = getattr(self, "num_kv_heads", self.num_heads)  # for keys and values
        write_cache(self, init_kv_cache((*input_shape[:-1], heads, self.head_dim), dtype))

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """See ``flax.nnx.MultiHeadAttention.__call__``."""
        options: dict[str, Any] = {"mask": mask, "deterministic": deterministic, "rngs": rngs}
        options |= {"sow_weights": sow_weights, "is_causal": is_causal}
        options |= {"out_sharding": out_sharding, "qkv_sharding": qkv_sharding}
        if input_positions is not None:
            if "input_positions" not in inspect.signature(super().__call__).parameters:
                raise TypeError(
                    f"input_positions needs a newer Flax than {flax.__version__}: "
                    "pip install -U flax"
                )
            options["input_positions"] = input_positions
        call = partial(super().__call__, inputs_q, inputs_k, inputs_v, **options)
        attention_fn, cached = self.attention_fn, read_cache(self)
        with self._sharing(inputs_q, inputs_k, inputs_v):
            if not (self.decode if decode is None else decode) or cached is None:
                return call(decode=decode)  # without a cache Flax says what is missing

            def attend(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> Any:
                cache, operands, mask = with_earlier(cached, query, key, value, given["mask"])
                write_cache(self, cache)
                given |= {"mask": mask, "is_causal": False}
                return attention_fn(*operands, **given)

            with replaced(self, attention_fn=attend):
                return call(decode=False)

    @contextlib.contextmanager
    def _sharing(self, q: Any, k: Any, v: Any) -> Iterator[None]:
        """Return a context in which projections of one array quantize it once."""
        k = q if k is None else k
        with contextlib.ExitStack() as stack:
            shared = shared_inputs(q, k, k if v is None else v)
            for layer, of_layer in zip((self.query, self.key, self.value), shared, strict=True):
                product = getattr(layer, "dot_general", None)
                if isinstance(product, DotGeneral):
                    stack.enter_context(replaced(product, shared_input=of_layer))
            yield


def has_stock_attention(layer: nnx.MultiHeadAttention) -> bool:
    """Return True if attention between the projections is still Flax's."""
    return layer.attention_fn is nnx.dot_product_attention


def install_attention(
    layer: nnx.MultiHeadAttention,
    *,
    recipe: RecipeLike | None,
    path: str = "",
) -> None:
    """Make `layer` compute attention itself in FP8 from now on."""
    inner = f"{path}/attention_fn" if path else ""
    attention = DotProductAttention(recipe=recipe, path=inner)
    layer.attention_fn = nnx.data(attention)


def install_cache(layer: Any, dtype: np.dtype | Format, path: str) -> type[MultiHeadAttention]:
    """Return the class with which `layer` keeps keys and values in `dtype`, or raise."""
    kind: Any = getattr(type(layer), "jfp8_original", type(layer))
    is_ours = issubclass(kind, MultiHeadAttention)
    if not is_ours and kind is not nnx.MultiHeadAttention:
        raise ValueError(
            f"cache_dtype={dtype}: {path!r} is a {kind.__name__}, a subclass of "
            "nnx.MultiHeadAttention that may keep its cache in its own way. Leave out "
            "cache_dtype, or use nnx.MultiHeadAttention."
        )
    if read_cache(layer) is not None:
        raise ValueError(
            f"cache_dtype={dtype}: {path!r} has a cache already, in another dtype. Convert the "
            "model first, then call init_cache of the converted model."
        )
    layer.cache_dtype = dtype
    return kind if is_ours else MultiHeadAttention
