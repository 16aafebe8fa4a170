"""Routes tokens to experts and their results back: the formulas of a mixture of experts.

Functions of arrays, without a framework. No token is dropped: an expert gets all that choose it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfp8.products.ragged.tiles import take_rows


class Routing(NamedTuple):
    """Where ``t`` tokens go, each to ``k`` of ``g`` experts; a copy of a token goes to each.

    Attributes:
      weights: f32[t, k], how much of each chosen expert's result a token gets.
      experts: i32[t, k], the chosen experts, the most probable first.
      probabilities: f32[t, g], the router's, of all experts.
      group_sizes: i32[g], how many copies go to each expert.
      order: i32[t * k], for each place among all copies, sorted by expert, the copy that is there;
        copy ``i`` is that of token ``i // k`` for its choice ``i % k``.
      places: i32[t * k], for each copy its place; the inverse of `order`.
    """

    weights: jax.Array
    experts: jax.Array
    probabilities: jax.Array
    group_sizes: jax.Array
    order: jax.Array
    places: jax.Array


def route(logits: jax.Array, experts_per_token: int, *, renormalize: bool) -> Routing:
    """The `experts_per_token` most probable experts of each token. ::

        p = softmax(logits)        weights = p_chosen, or p_chosen / sum p_chosen

    Args:
      logits: f32[t, g].
      experts_per_token: ``k``.
      renormalize: make the weights of a token sum to 1. (With one expert per token they are then
        all 1, and the router gets no gradient through them.)

    Raises:
      ValueError: `experts_per_token` is not from 1 to ``g``.
    """
    groups = logits.shape[1]
    if not 1 <= experts_per_token <= groups:
        raise ValueError(
            f"experts_per_token={experts_per_token} must be from 1 to the number of experts, "
            f"{groups}."
        )
    return _route(logits, experts_per_token, renormalize)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _route(logits: jax.Array, experts_per_token: int, renormalize: bool) -> Routing:
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = _largest(probabilities, experts_per_token)
    experts = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    weights = jnp.sum(jnp.where(chosen, probabilities[:, None], 0), axis=-1)
    group_sizes = jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    indices = jnp.arange(order.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
    return Routing(weights, experts, probabilities, group_sizes, order, places)


def _largest(scores: jax.Array, k: int) -> jax.Array:
    """Which are the `k` largest of each row, the largest first: bool[t, k, g].

    As ``jax.lax.top_k``, of which the compiler would gather all rows on every device.
    """
    index = jnp.arange(scores.shape[1])[None]
    found: list[jax.Array] = []
    for _ in range(k):
        found.append(index == jnp.argmax(scores, axis=1)[:, None])
        scores = jnp.where(found[-1], -jnp.inf, scores)
    return jnp.stack(found, axis=1)


def to_experts(x: jax.Array, routing: Routing) -> jax.Array:
    """A copy of each token for each expert it chose, sorted by expert: [t, d] -> [t * k, d]."""
    copies = jnp.repeat(x, routing.experts.shape[1], axis=0)
    return take_rows(copies, routing.order, routing.places)


def from_experts(y: jax.Array, routing: Routing) -> jax.Array:
    """For each token, the weighted sum of its experts' results: [t * k, d] -> f32[t, d]."""
    tokens, k = routing.experts.shape
    back = take_rows(y, routing.places, routing.order).reshape(tokens, k, y.shape[-1])
    return jnp.sum(back.astype(jnp.float32) * routing.weights[:, :, None], axis=1)


def load_balancing_loss(routing: Routing) -> jax.Array:
    """How unevenly tokens go to the experts: ``g * sum_i f_i P_i``, f32[].

    ``f_i`` is the fraction of all choices that fell on expert ``i`` and ``P_i`` the mean of its
    probabilities, through which alone there is a gradient. It is 1 if both are equal for all
    experts, and at most ``g``. Add a small multiple of it to the loss, such as 0.01 times.

    References:
      Switch Transformers, arXiv 2101.03961, equations 4 to 6, for one choice per token.
    """
    groups = routing.probabilities.shape[1]
    f = routing.group_sizes / jnp.maximum(routing.order.shape[0], 1)
    p = jnp.mean(routing.probabilities, axis=0)
    return groups * jnp.sum(f * p)
