"""The formulas of a Transformer layer between its products: functions of arrays, no framework.

Everything here is computed in float32 at least, whatever the dtype of the operands. Results that
cost little to compute again are not kept for the backward pass, only their input, in FP8 if wanted.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.layers import kv_cache
from jfp8.layers.attention_math import check_weights_stay_inside
from jfp8.layers.kv_cache import KVCache
from jfp8.layers.options import check_option
from jfp8.layers.position_math import Rotary, position_mask, rotary_embedding
from jfp8.matmul.planner import planner_of
from jfp8.products.mlp import make_all
from jfp8.products.observers import OBSERVER
from jfp8.products.saved_activations import keeping_inputs, save_in_fp8
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format
from jfp8.tracing.device import current_device, explicit_mesh_of, has_explicit_axes
from jfp8.tracing.notes import EXPLAINING


def _identity(x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True)
class ClampedSwiglu:
    """An activation of two projections, which are bounded. ::

        y = a * sigmoid(alpha * a) * (b + offset)    a = min(x_0, limit)
                                                     b = min(max(x_1, -limit), limit)

    With these numbers, also called ``"clamped_swiglu"``, it is that of gpt-oss. DeepSeek-V4 has
    ``ClampedSwiglu(limit=10.0, alpha=1.0, offset=0.0)``.

    Attributes:
      limit: largest `a`, and largest magnitude of `b` before `offset` is added.
      alpha: factor in the sigmoid.
      offset: added to `b`.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @property
    def functions(self) -> tuple[Callable[[jax.Array], jax.Array], ...]:
        """Return the function of each projection, as in `ACTIVATIONS`."""

        def gate(x: jax.Array) -> jax.Array:
            x = jnp.minimum(x, self.limit)
            return x * jax.nn.sigmoid(self.alpha * x)

        return gate, lambda x: jnp.clip(x, -self.limit, self.limit) + self.offset


# Each activation takes as many projections of the input as it has functions, and multiplies what
# these make of them: the gated ones have two.
ACTIVATIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], ...]] = {
    "gelu": (jax.nn.gelu,),
    "silu": (jax.nn.silu,),
    "relu": (jax.nn.relu,),
    "squared_relu": (lambda x: jnp.square(jax.nn.relu(x)),),
    "geglu": (jax.nn.gelu, _identity),
    "swiglu": (jax.nn.silu, _identity),
    "reglu": (jax.nn.relu, _identity),
    "clamped_swiglu": ClampedSwiglu().functions,
}


def functions_of(activation: str | ClampedSwiglu) -> tuple[Callable[[jax.Array], jax.Array], ...]:
    """Return the functions of `activation`, as in `ACTIVATIONS`; for an unknown one list those."""
    if isinstance(activation, ClampedSwiglu):
        return activation.functions
    check_option("activation", activation, tuple(ACTIVATIONS))
    return ACTIVATIONS[activation]


def projections_of(activation: str | ClampedSwiglu) -> int:
    """Return the number of projections that `activation` takes: 1, or 2 if it is gated."""
    return len(functions_of(activation))


@dataclass(frozen=True)
class Activation:
    """One of `ACTIVATIONS`, as a function of its projections."""

    name: str | ClampedSwiglu

    def __call__(self, *projections: jax.Array) -> jax.Array:
        functions = functions_of(self.name)
        made = [f(x) for f, x in zip(functions, projections, strict=True)]
        return functools.reduce(operator.mul, made)


def activate(
    x: jax.Array, activation: str | ClampedSwiglu, *, saved_activations: Format | None = None
) -> jax.Array:
    """Return the activation of `projections_of(activation)` projections of an input. ::

        gelu, silu, relu   y = f(x_0)              geglu, swiglu, reglu   y = f(x_0) * x_1
        squared_relu       y = relu(x_0)^2

    ``gelu`` is its approximation by tanh, as in Flax and Transformer Engine.

    Args:
      x: ``[..., projections, features]``; the result is ``[..., features]`` in its dtype.
      saved_activations: see `jfp8.layers.norm_math.normalize`.

    References:
      arXiv 2002.05202 (the gated ones), arXiv 2109.08668 (squared relu).
    """
    n = projections_of(activation)
    if x.ndim < 2 or x.shape[-2] != n:
        raise ValueError(
            f"{activation!r} takes {n} projections, x of shape [..., {n}, features]; got {x.shape}."
        )
    return keeping_inputs(partial(make_all, Activation(activation)), saved_activations)(x)


def may_be_one_operation(recipes: Sequence[Recipe], *operands: Any) -> bool:
    """Return True if two matmuls with an activation between them are computed as one operation.

    They are where kernels quantize: see `jfp8.products.mlp`. Reports show matmuls one by one.
    """
    watched = EXPLAINING.value is not None or OBSERVER.value is not None
    if watched or len(recipes) < 2:
        return False
    explicit = has_explicit_axes() or explicit_mesh_of(operands) is not None
    return planner_of(current_device()).quantizes_by_kernels() and not explicit


@jax.custom_jvp
def residual_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``x + y`` in the dtype of `x`, where `y` is what a product wrote."""
    return planner_of(current_device(x, y)).add(x, y.astype(x.dtype))


@residual_sum.defjvp
def _residual_sum_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    dx, dy = tangents
    return residual_sum(*primals), dx + dy.astype(dx.dtype)


def drop(x: jax.Array, key: jax.Array | None, *, rate: float) -> jax.Array:
    """Drop a share `rate` of `x` as Flax's ``Dropout``; without a `key` return `x` as it is."""
    if key is None:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def both_masks(causal: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Two masks combined, of which the second may be missing."""
    if mask is None:
        return causal
    # Flax makes masks of floats, too.
    causal, mask = jnp.broadcast_arrays(causal, jnp.asarray(mask, bool))
    return causal & mask


def sum_of_biases(relative: jax.Array, given: jax.Array | None) -> jax.Array:
    """Return the sum of two biases of attention scores, of which the second may be missing."""
    if given is None:
        return relative
    relative, given = jnp.broadcast_arrays(relative, given)
    return relative + given


def projected_attention(
    query: jax.Array,
    keys_values: jax.Array,
    *,
    attention: Callable[..., jax.Array],
    in_fp8: bool = True,
    rotary: Rotary | None = None,
    cache: KVCache | None = None,
    mask: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    saved_activations: Format | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache | None]:
    """Compute attention of projections for each of ``G`` groups: ``[..., q, H, depth]``.

    Args:
      query: ``[..., q, G, H / G, depth]``.
      keys_values: ``[..., k, G, 2, depth]``.
      attention: `jfp8.layers.attention_math.attend` with some arguments; quantizes if `in_fp8`.
      cache: keys and values of earlier positions, for decoding. `query` and `keys_values` are then
        of the next ones, and the mask is for all ``max_length`` keys. Returned with the new keys.
      dropout_rate, dropout_key: see `drop`; for the weights, only in high precision.
      saved_activations: keep the values in this format for the backward pass, queries and keys as
        they are (an error in a score would be one in the exponent of a weight); in high precision.
      options: arguments of `attend`: the bias, sinks, and which keys a query sees. With a
        `cache` the mask alone says that.
    """
    *leading, groups, shared_by, depth = query.shape
    query = query.reshape(*leading, groups * shared_by, depth)
    key, value = keys_values[..., 0, :], keys_values[..., 1, :]
    if rotary is not None:
        windows, method = rotary
        positions = None if cache is None else cache.index + jnp.arange(query.shape[-3])
        turn = partial(rotary_embedding, positions=positions, windows=windows, group_method=method)
        query, key = turn(query), turn(key)
    if cache is not None:
        cache = kv_cache.extended(cache, key, value)
        query = kv_cache.nan_if_full(query, cache)
        key, value = kv_cache.keys_and_values(cache, value.dtype)
    bias = options.pop("bias", None)
    dropped = 0.0 if dropout_key is None else dropout_rate
    if in_fp8:
        check_weights_stay_inside(dropped, sown=False)
        return attention(query, key, value, bias, mask, **options), cache
    # JAX's attention drops no weights, and computes the softmax in float32.
    by_weights = dropped or value.dtype == jnp.float64
    if by_weights:
        attention = partial(attention_by_weights, dropout=partial(drop, rate=dropout_rate))

    def attend(value, query, key, bias, mask, sinks, tokens, dropout_key) -> jax.Array:
        arrays: dict[str, Any] = {"sinks": sinks, "tokens": tokens}
        if by_weights:
            arrays["dropout_args"] = (dropout_key,)
        return attention(query, key, value, bias, mask, **options, **arrays)

    rest = options.pop("sinks", None), options.pop("tokens", (None,) * 4)
    if saved_activations is not None:
        attend = save_in_fp8(attend, fmt=saved_activations)
    return attend(value, query, key, bias, mask, *rest, dropout_key), cache


def attention_by_weights(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    tokens: tuple[jax.Array | None, ...] = (None,) * 4,
    sinks: jax.Array | None = None,
    dropout: Callable[..., jax.Array] = _identity,
    dropout_args: tuple[Any, ...] = (),
) -> jax.Array:
    """Compute `attend` with an array of all weights, of which some may be dropped. ::

        y = dropout(softmax(query . key^T / sqrt(depth) + bias)) . value

    Args:
      query: ``[..., q, H, depth]``; head ``h`` reads head ``h // (H / G)`` of `key` and `value`.
      key, value: ``[..., k, G, depth]``, where ``G`` divides ``H``.
      dropout: a function of the weights, ``[..., H, q, k]`` in float32, and of `dropout_args`,
        such as a key.
    """
    *batch, q_length, heads, depth = query.shape
    k_length, groups = key.shape[-3:-1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    every_head = (*batch, heads, q_length, k_length)
    grouped = (*batch, groups, heads // groups, q_length, k_length)
    query = query.reshape(*batch, q_length, groups, heads // groups, depth)
    by = "...qgrd,...kgd->...grqk"
    scores = jnp.einsum(by, query, key, preferred_element_type=wide)
    scores = scores.reshape(every_head) / np.sqrt(depth).astype(wide)
    if bias is not None:
        scores += jnp.broadcast_to(bias, every_head).astype(wide)
    places = (q_length, k_length), is_causal, local_window_size
    seen = jnp.broadcast_to(position_mask(*places), every_head)
    *_, of_query, of_key = tokens
    if of_query is not None and of_key is not None:
        seen = seen & (of_query[..., None, :, None] == of_key[..., None, None, :])
    if mask is not None:
        seen = seen & jnp.broadcast_to(jnp.asarray(mask, bool), every_head)
    scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None, None].astype(wide), (*every_head[:-1], 1))
        scores = jnp.concatenate([scores, sinks], -1)
    weights = jnp.where(seen, jax.nn.softmax(scores)[..., :k_length], 0)
    weights = dropout(weights, *dropout_args).astype(value.dtype)
    context = jnp.einsum("...grqk,...kgd->...qgrd", weights.reshape(grouped), value)
    return context.reshape(*batch, q_length, heads, depth)
