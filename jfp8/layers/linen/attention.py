"""Flax's attention layer with FP8 matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax
from flax.typing import PRNGKey

from jfp8.layers.kv_cache import with_earlier
from jfp8.layers.linen.dot_product_attention import DotProductAttention, attention_fn_by, is_stock
from jfp8.layers.linen.kv_cache import read_cache, write_cache
from jfp8.layers.linen.layers import own_product
from jfp8.layers.linen.products import DotGeneral, ProductModule, ProductOf, promote_dtype
from jfp8.layers.linen.state_in_gradients import StateCollection
from jfp8.layers.options import replaced
from jfp8.matmul.spec import Implementation
from jfp8.products import einsum
from jfp8.products.shared_input import SharedInput, shared_inputs
from jfp8.recipes.registry import RecipeLike
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import FormatLike

# Flax's hooks for the two matmuls of attention.
EINSUM_HOOKS = ("qk_attn_weights_einsum", "attn_weights_value_einsum")


class EinsumProduct(ProductModule):
    """An FP8 einsum of two operands with its state.

    For the attributes see `ProductModule`. Not for attention's own matmuls, where one scale would
    depend on keys that a query may not see: `DotProductAttention` computes those matmuls.
    """

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array | ScaledArray,
        *,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Return ``jnp.einsum(equation, lhs, rhs)`` in FP8; see `jfp8.scaled_dot_general`.

        Args:
          equation: two operands and a result: ``"...qhd,...khd->...hqk"``.
          lhs, rhs: ``f32 | bf16 | f16`` arrays; `rhs` may be a `ScaledArray`.
          precision: the matmul's if FP8 is disabled (see `jfp8.autocast`).
          preferred_element_type: dtype of the result.

        Raises:
          ValueError: the equation does not have two operands and a result.
        """
        dot_general = DotGeneral(
            self.recipe,
            self.implementation,
            state_collection=self.state_collection,
        )
        return einsum.as_dot_general(
            einsum.parse(equation, lhs.ndim, rhs.ndim),
            lhs,
            rhs,
            lambda lhs, rhs, numbers: dot_general(
                lhs, rhs, numbers, precision, preferred_element_type
            ),
        )


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """``flax.linen.MultiHeadDotProductAttention`` with its projections in FP8.

    Accepts every argument of Flax's layer except hooks for matmuls; the ``params`` are the same as
    in Flax, with the same initial values for the same key. A kernel may be a `ScaledArray`.

    Attributes:
      recipe, implementation, state_collection: see `Dense`.
      attention_products: also compute attention itself in FP8, by `DotProductAttention`: no array
        of ``[queries, keys]``, and 0 for a query that sees no key, instead of the mean of all
        values as in Flax. Errors of the scores affect the softmax: try it, and compare.
      cache_dtype: dtype of the cache of ``decode=True``; see `TransformerLayer`. Flax's layer
        accepts one position per call, this layer any number.

    Raises:
      ValueError: a hook for matmuls; or `attention_products` with `precision`, with an
        `attention_fn` or hook for its matmuls, or if called for dropout of attention weights or
        with ``sow_weights``; ``decode=True`` without a cache.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> layer = jfp8.linen.MultiHeadDotProductAttention(num_heads=2)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3, 8)))
    >>> sorted(variables["params"]) == sorted(variables["fp8"]) == ["key", "out", "query", "value"]
    True
    """

    recipe: RecipeLike | None = None
    implementation: Implementation = None
    attention_products: bool = False
    _: KW_ONLY
    state_collection: StateCollection = "fp8"
    cache_dtype: FormatLike | None = None

    def __post_init__(self) -> None:
        self.qkv_dot_general_cls = own_product(self, DotGeneral, "qkv_dot_general")
        self.out_dot_general_cls = own_product(self, DotGeneral, "out_dot_general")
        if self.attention_products:
            self._check_attention()
        super().__post_init__()

    def _check_attention(self) -> None:
        """Raise ``ValueError`` for an argument that FP8 attention would ignore."""
        given = [f"{hook}_cls" for hook in EINSUM_HOOKS if getattr(self, f"{hook}_cls") is not None]
        given += [] if is_stock(self.attention_fn) else ["attention_fn"]
        if given:
            raise ValueError(
                f"attention_products=True computes attention itself in FP8, so {', '.join(given)} "
                "would have no effect. Leave out one of the two."
            )
        if self.precision is not None:
            raise ValueError(
                f"attention_products=True with precision={self.precision!r}: the FP8 matmuls have "
                "no choice of precision. Leave out one of the two."
            )

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKey | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """See ``flax.linen.MultiHeadDotProductAttention.__call__``."""
        # Any: its overloads do not include a call with all arguments.
        attend: Any = super().__call__
        attention_fn = self.attention_fn
        if self.attention_products and is_stock(attention_fn):  # not yet set by a conversion
            attention_fn = attention_fn_by(self._attention, attention_fn)
        own: dict[str, Any] = {"attention_fn": attention_fn}
        if self.decode:
            own = cached(self, self.cache_dtype, attention_fn)
        k = v = inputs_kv
        if inputs_kv is None:
            k = inputs_q if inputs_k is None else inputs_k
            v = k if inputs_v is None else inputs_v
        shared = dict(zip(("query", "key", "value"), shared_inputs(inputs_q, k, v), strict=True))
        project = functools.partial(_project, shared)
        with nn.intercept_methods(project), replaced(self, **own):
            return attend(
                inputs_q,
                inputs_k,
                inputs_v,
                inputs_kv=inputs_kv,
                mask=mask,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
                sow_weights=sow_weights,
            )

    @nn.nowrap
    def _attention(self, **where: Any) -> DotProductAttention:
        return DotProductAttention(self.recipe, **where)


def cached(
    layer: nn.MultiHeadDotProductAttention, dtype: Any, attention_fn: Callable[..., jax.Array]
) -> dict[str, Any]:
    """Return attributes with which Flax's `layer` attends to all positions so far.

    Args:
      dtype: dtype of its cache, see `init_kv_cache`; None for the dtype of the keys.
    """

    @functools.wraps(attention_fn)  # Flax passes the arguments in the signature
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        cache = read_cache(layer, key.shape, key.dtype if dtype is None else dtype)
        if cache is None:
            return attention_fn(query, key, value, **options)
        cache, operands, mask = with_earlier(cache, query, key, value, options.get("mask"))
        write_cache(layer, cache)
        options["mask"] = mask
        return attention_fn(*operands, **options)

    return {"decode": False, "attention_fn": attend}


def _project(shared, next_fun, args, kwargs, context):
    """Intercept Flax's own projections, which promote dtypes, and quantize each input once."""
    layer = context.module
    if isinstance(layer, nn.DenseGeneral):
        # Flax has just created it for this one call, so the change is invisible elsewhere.
        made = layer.dot_general_cls
        own: dict[str, Any] = {"promote_dtype": promote_dtype}
        if isinstance(made, ProductOf) and layer.name in shared:
            own["dot_general_cls"] = functools.partial(_product_of, made, shared[layer.name])
        for name, value in own.items():
            object.__setattr__(layer, name, value)
    return next_fun(*args, **kwargs)


def _product_of(made: ProductOf, shared: SharedInput) -> Callable[..., jax.Array]:
    return functools.partial(made(), shared_input=shared)
