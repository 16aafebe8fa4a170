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

from jfp8.layers.attention_math import attend, check_weights_stay_inside
from jfp8.layers.kv_cache import KVCache, with_earlier
from jfp8.layers.options import check_option
from jfp8.layers.position_math import Rotary, rotary_embedding
from jfp8.matmul.planner import planner_of
from jfp8.products.mlp import make_all
from jfp8.products.observers import OBSERVER
from jfp8.products.saved_activations import keeping_inputs, save_in_fp8
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format
from jfp8.tracing.device import current_device, explicit_mesh
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
    return planner_of(current_device()).quantizes_by_kernels() and explicit_mesh(operands) is None


@jax.custom_jvp
def residual_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``x + y`` in the dtype of `x`, where `y` is what a product wrote."""
    return planner_of(current_device(x, y)).add(x, y.astype(x.dtype))


@residual_sum.defjvp
def _residual_sum_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    dx, dy = tangents
    return residual_sum(*primals), dx + dy.astype(dx.dtype)


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
    in_fp8: Callable[..., jax.Array] | None = None,
    rotary: Rotary | None = None,
    cache: KVCache | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    saved_activations: Format | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache | None]:
    """Compute attention of projections for each of ``G`` groups: ``[..., q, H, depth]``.

    Args:
      query: ``[..., q, G, H / G, depth]``.
      keys_values: ``[..., k, G, 2, depth]``.
      in_fp8: attention with a recipe, by `attend_by`; None for high precision.
      cache: keys and values of earlier positions, for decoding. `query` and `keys_values` are then
        of the next ones, and the mask is for all ``max_length`` keys. Returned with the new keys.
      dropout_rate, dropout_key: drop weights of attention; no key: none. Only in high precision.
      saved_activations: keep the values in this format for the backward pass, queries and keys as
        they are (an error in a score would be one in the exponent of a weight); in high precision.
      options: arguments of `attend`: mask, bias, sinks, and which keys a query sees; causal ones
        with a `cache`.
    """
    *leading, groups, shared_by, depth = query.shape
    query = query.reshape(*leading, groups * shared_by, depth)
    key, value = keys_values[..., 0, :], keys_values[..., 1, :]
    if rotary is not None:
        windows, method = rotary
        positions = None if cache is None else cache.index + jnp.arange(query.shape[-3])
        turn = partial(rotary_embedding, positions=positions, windows=windows, group_method=method)
        query, key = turn(query), turn(key)
    names = "bias", "mask", "sinks"
    arrays = {name: options.pop(name, None) for name in names}
    if cache is not None:
        window = options.pop("local_window_size", None)
        cache, operands, arrays["mask"] = with_earlier(
            cache, query, key, value, arrays["mask"], window
        )
        query, key, value = operands
        options["is_causal"] = False
    if in_fp8 is not None:
        check_weights_stay_inside(0.0 if dropout_key is None else dropout_rate, sown=False)
        return in_fp8(query, key, value, **arrays, **options), cache

    def in_high_precision(value: jax.Array, query: jax.Array, key: jax.Array, rest: Any) -> Any:
        return attend(query, key, value, **rest, **options, recipe=None, dropout_rate=dropout_rate)

    rest = {**arrays, "tokens": options.pop("tokens", (None,) * 4), "dropout_key": dropout_key}
    if saved_activations is not None:
        in_high_precision = save_in_fp8(in_high_precision, fmt=saved_activations)
    return in_high_precision(value, query, key, rest), cache
