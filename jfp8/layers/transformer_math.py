"""The formulas of a Transformer layer between its products: functions of arrays, no framework.

Everything here is computed in float32 at least, whatever the dtype of the operands. What costs
little to compute again is not kept for the backward pass, only its input, in FP8 if wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.products.saved_activations import save_in_fp8
from jfp8.scaling.formats import Format

LayerNormType = Literal["layernorm", "rmsnorm"]
GroupMethod = Literal["consecutive", "alternate"]
EinsumFunction = Callable[..., jax.Array]


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless `value`, given for `name`, is one of `allowed`."""
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def _keeping_inputs(f: Callable[..., jax.Array], saved: Format | None) -> Callable[..., jax.Array]:
    """`f`, of which the backward pass keeps the arguments only; the first in `saved`, if given."""
    return jax.checkpoint(f) if saved is None else save_in_fp8(f, fmt=saved)


def normalize(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    axes: Sequence[int] = (-1,),
    epsilon: float = 1e-6,
    layernorm_type: LayerNormType = "layernorm",
    zero_centered_gamma: bool = False,
    saved_activations: Format | None = None,
) -> jax.Array:
    """Layer normalisation, or root mean square normalisation. ::

        layernorm  y = (x - mean(x)) / sqrt(var(x) + epsilon) * gamma + bias
        rmsnorm    y =  x            / sqrt(mean(x^2) + epsilon) * gamma + bias

    ``gamma`` is `scale`, or ``1 + scale`` with `zero_centered_gamma`.

    Args:
      x: floating array.
      scale, bias: of the shape of `axes`, in the order of `axes`.
      axes: of `x`, over which it is normalised.
      saved_activations: keep `x` in this format for the backward pass; None: as it is.

    Returns:
      Array of the shape of `x`, in float32 at least.

    Raises:
      ValueError: unknown `layernorm_type`.

    References:
      arXiv 1607.06450 (LayerNorm), 1910.07467 (RMSNorm).
    """
    check_choice("layernorm_type", layernorm_type, ("layernorm", "rmsnorm"))
    axes = tuple(axis % x.ndim for axis in axes)

    def run(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if layernorm_type == "layernorm":
            x = x - jnp.mean(x, axes, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + epsilon)
        gamma = _along(scale, axes, x)
        y = y * (1 + gamma if zero_centered_gamma else gamma)
        return y if bias is None else y + _along(bias, axes, x)

    return _keeping_inputs(run, saved_activations)(x, scale, bias)


def _along(parameter: jax.Array, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """`parameter`, whose dimensions are the `axes` of `x`, laid out to broadcast against `x`."""
    parameter = parameter.astype(x.dtype).transpose(np.argsort(axes).tolist())
    return parameter.reshape([n if d in axes else 1 for d, n in enumerate(x.shape)])


def _identity(x: jax.Array) -> jax.Array:
    return x


def _squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


# Each activation takes as many projections of the input as it has functions, and multiplies what
# these make of them: the gated ones have two.
ACTIVATIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], ...]] = {
    "gelu": (jax.nn.gelu,),
    "silu": (jax.nn.silu,),
    "relu": (jax.nn.relu,),
    "squared_relu": (_squared_relu,),
    "geglu": (jax.nn.gelu, _identity),
    "swiglu": (jax.nn.silu, _identity),
    "reglu": (jax.nn.relu, _identity),
}


def projections_of(activation: str) -> int:
    """How many projections of the input `activation` takes: 1, or 2 if it is gated.

    Raises:
      ValueError: unknown `activation`; the message lists the known ones.
    """
    check_choice("activation", activation, tuple(ACTIVATIONS))
    return len(ACTIVATIONS[activation])


def activate(
    x: jax.Array, activation: str, *, saved_activations: Format | None = None
) -> jax.Array:
    """The activation of `projections_of(activation)` projections of an input. ::

        gelu, silu, relu   y = f(x_0)              geglu, swiglu, reglu   y = f(x_0) * x_1
        squared_relu       y = relu(x_0)^2

    ``gelu`` is its approximation by tanh, as in Flax and Transformer Engine.

    Args:
      x: ``[..., projections, features]``.
      saved_activations: see `normalize`.

    Returns:
      ``[..., features]``, in the dtype of `x`.

    Raises:
      ValueError: unknown `activation`, or another number of projections.

    References:
      arXiv 2002.05202 (the gated ones), 2109.08668 (squared relu).
    """
    n = projections_of(activation)
    if x.ndim < 2 or x.shape[-2] != n:
        raise ValueError(
            f"{activation!r} takes {n} projections, x of shape [..., {n}, features]; got {x.shape}."
        )

    def run(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y, *gates = (f(wide[..., i, :]) for i, f in enumerate(ACTIVATIONS[activation]))
        for gate in gates:
            y = y * gate
        return y.astype(x.dtype)

    return _keeping_inputs(run, saved_activations)(x)


def drop(x: jax.Array, key: jax.Array | None, *, rate: float) -> jax.Array:
    """`x` with a share `rate` of its elements 0 and the others divided by ``1 - rate``.

    Without a `key`, `x` as it is. With one, the numbers of Flax's ``Dropout``.
    """
    if key is None:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def causal_mask(query_length: int, key_length: int) -> jax.Array:
    """``bool[query_length, key_length]``: a query may attend to no key after it."""
    return jnp.arange(query_length)[:, None] >= jnp.arange(key_length)[None, :]


def grouped_query_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    dropout: Callable[..., jax.Array] = _identity,
    dropout_args: tuple[Any, ...] = (),
    scores_einsum: EinsumFunction = jnp.einsum,
    context_einsum: EinsumFunction = jnp.einsum,
    saved_activations: Format | None = None,
) -> jax.Array:
    """Attention in which groups of query heads share the heads of keys and values. ::

        y = dropout(softmax(query . key^T / sqrt(depth) + bias)) . value

    Head ``h`` of the query reads head ``h // (H / G)`` of `key` and `value`; ``G = H`` is
    multi-head attention and ``G = 1`` multi-query attention. Where `mask` leaves nothing to attend
    to, all keys weigh the same.

    Args:
      query: ``[..., q, H, depth]``.
      key, value: ``[..., k, G, depth]``, where ``G`` divides ``H``.
      mask: broadcast to ``[..., H, q, k]``: True or 1 where a query may attend to a key.
      bias: broadcast to ``[..., H, q, k]``.
      dropout: of the weights, ``[..., H, q, k]`` in float32, and of `dropout_args`, such as a key.
      scores_einsum, context_einsum: compute the two products, like ``jnp.einsum``.
      saved_activations: keep `value` in this format for the backward pass, `query` and `key` as
        they are, and compute the weights again. An error of a score would be that of the exponent
        of a weight. `dropout` is then a function without side effects, and closes over no array.
        None, or products other than ``jnp.einsum``: keep the weights.

    Returns:
      ``[..., q, H, depth]``, in the dtype of `value`.

    Raises:
      ValueError: ``G`` does not divide ``H``.

    References:
      arXiv 1706.03762, 2305.13245 (grouped queries).
    """
    *batch, q_length, heads, depth = query.shape
    k_length, groups = key.shape[-3:-1]
    if heads % groups:
        raise ValueError(
            f"{heads} heads of the query cannot share {groups} heads of keys and values evenly. "
            "The former must be a multiple of the latter."
        )
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = (*batch, groups, heads // groups, q_length, k_length)
    every_head = (*batch, heads, q_length, k_length)

    def attend(value, query, key, mask, bias, dropout_args) -> jax.Array:
        query = query.reshape(*batch, q_length, groups, heads // groups, depth)
        scores = scores_einsum("...qgrd,...kgd->...grqk", query, key, preferred_element_type=wide)
        scores = scores.reshape(every_head) / np.sqrt(depth).astype(wide)
        if bias is not None:
            scores += jnp.broadcast_to(bias, every_head).astype(wide)
        if mask is not None:
            scores = jnp.where(jnp.broadcast_to(mask, every_head), scores, jnp.finfo(wide).min)
        weights = dropout(jax.nn.softmax(scores), *dropout_args).astype(value.dtype)
        context = context_einsum("...grqk,...kgd->...qgrd", weights.reshape(grouped), value)
        return context.reshape(*batch, q_length, heads, depth)

    if saved_activations is not None and scores_einsum is context_einsum is jnp.einsum:
        attend = save_in_fp8(attend, fmt=saved_activations)
    return attend(value, query, key, mask, bias, dropout_args)


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    windows: tuple[float, float] = (1, 10_000),
    group_method: GroupMethod = "consecutive",
) -> jax.Array:
    """Rotary position embedding: pairs of features turn by an angle that grows with the position.

    Pair ``i`` of ``depth / 2`` turns by ``position / (lo * (hi / lo)^(2 i / depth))``, where
    ``lo, hi`` are the `windows`. The product of a query and a key then depends on the distance
    between them only.

    Args:
      x: ``[..., length, heads, depth]``, with an even depth.
      positions: ``[length]``, or with leading dimensions of `x`; default: 0, 1, 2 ...
      windows: shortest and longest wavelength, in units of ``2 pi`` positions.
      group_method: which features are pairs: ``"consecutive"`` ones, ``(2 i, 2 i + 1)``, or
        ``"alternate"``, ``(i, i + depth / 2)``.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      ValueError: unknown `group_method`, or an odd depth.

    References:
      arXiv 2104.09864, which pairs consecutive features; Llama's and GPT-NeoX's weights are for
      ``"alternate"``.
    """
    check_choice("group_method", group_method, ("consecutive", "alternate"))
    length, _, depth = x.shape[-3:]
    if depth % 2:
        raise ValueError(f"Rotary embedding turns pairs of features, but there are {depth}.")
    shortest, longest = windows
    wavelengths = shortest * (longest / shortest) ** (np.arange(0, depth, 2) / depth)
    if positions is None:
        positions = jnp.arange(length)
    leading = (1,) * (x.ndim - 2 - positions.ndim)
    positions = positions.reshape(*leading, *positions.shape, 1, 1)
    angles = positions / wavelengths.astype(np.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    sin, cos = jnp.sin(angles), jnp.cos(angles)

    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if group_method == "consecutive":
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


def relative_position_buckets(
    distances: np.ndarray,
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> np.ndarray:
    """The bucket of each distance, as T5 has them.

    One half of the buckets is for exact distances, the other for ranges that grow in proportion up
    to `max_distance`; the last one is for all beyond. If `bidirectional`, one half of all is for
    keys before the query and one for keys after it; otherwise keys after it share bucket 0.

    Args:
      distances: integers: position of the key minus position of the query.

    Returns:
      Integers of the same shape, ``0 <= bucket < num_buckets``.

    References:
      arXiv 1910.10683; ``_relative_position_bucket`` of Mesh TensorFlow and T5X.
    """
    backwards, first = -np.asarray(distances), np.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        first = np.where(backwards < 0, num_buckets, 0)
        backwards = np.abs(backwards)
    backwards = np.maximum(backwards, 0)
    exact = num_buckets // 2
    # The published rule's epsilon: a distance on the border belongs to the farther bucket.
    ratio = np.maximum(backwards, 1) / exact + np.finfo(np.float32).eps
    steps = np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)
    ranged = np.minimum(exact + steps.astype(np.int64), num_buckets - 1)
    return first + np.where(backwards < exact, backwards, ranged)


def relative_position_bias(
    table: jax.Array,
    query_length: int,
    key_length: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
) -> jax.Array:
    """The bias of attention scores that `table` holds for the distance of each query and key.

    Args:
      table: ``[heads, num_buckets]``; see `relative_position_buckets`.

    Returns:
      ``[heads, query_length, key_length]``.
    """
    # There are far fewer distances than pairs: look up the former once.
    distances = np.arange(1 - query_length, key_length)
    buckets = relative_position_buckets(
        distances,
        bidirectional=bidirectional,
        num_buckets=table.shape[-1],
        max_distance=max_distance,
    )
    by_distance = table[:, buckets]
    pairs = jnp.arange(key_length)[None, :] - jnp.arange(query_length)[:, None]
    return by_distance[:, pairs + (query_length - 1)]
