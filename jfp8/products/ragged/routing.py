"""Routes tokens to experts and their results back: the formulas of a mixture of experts.

Functions of arrays, without a framework. No token is dropped: an expert gets all that choose it.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.products.ragged.tiles import take_rows
from jfp8.tracing.compat import axes_apart

Scores = Literal["softmax", "sigmoid"]
SCORES: tuple[Scores, ...] = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """Where ``t`` tokens go, each to ``k`` of ``g`` experts; a copy of a token goes to each.

    Attributes:
      weights: f32[t, k], how much of each chosen expert's result a token gets.
      experts: i32[t, k], the chosen experts, the most probable first.
      probabilities: f32[t, g], the router's, of all experts: their scores, divided by the sum of a
        token's.
      group_sizes: i32[g], how many copies go to each expert.
      order: i32[t * k], for each place among all copies, sorted by expert, the copy that is there;
        copy ``i`` is that of token ``i // k`` for its choice ``i % k``.
      places: i32[t * k], for each copy its place; the inverse of `order`.
      logits: f32[t, g], what the scores are of.
    """

    weights: jax.Array
    experts: jax.Array
    probabilities: jax.Array
    group_sizes: jax.Array
    order: jax.Array
    places: jax.Array
    logits: jax.Array | None = None


def route(
    logits: jax.Array,
    experts_per_token: int,
    *,
    renormalize: bool,
    scores: Scores = "softmax",
    bias: jax.Array | None = None,
) -> Routing:
    """Return the `experts_per_token` experts of each token whose score and bias are largest. ::

        s = softmax(logits) or sigmoid(logits)       chosen = top k of s + bias
        weights = s_chosen, or s_chosen / sum s_chosen

    The bias decides which experts are chosen, and nothing else: no weight has it, and there is no
    gradient by it.

    Args:
      logits: f32[t, g].
      experts_per_token: ``k``.
      renormalize: make the weights of a token sum to 1. (With one expert per token they are then
        all 1, and the router gets no gradient through them.)
      scores: ``"softmax"``: experts compete for a token; ``"sigmoid"``: each is scored by itself.
      bias: f32[g], see `updated_bias`; None: none.

    Raises:
      ValueError: `experts_per_token` is not from 1 to ``g``; unknown `scores`.

    References:
      DeepSeek-V3, arXiv 2412.19437, equations 12 to 16, for sigmoid and bias.
    """
    groups = logits.shape[1]
    if not 1 <= experts_per_token <= groups:
        raise ValueError(
            f"experts_per_token={experts_per_token} must be from 1 to the number of experts, "
            f"{groups}."
        )
    if scores not in SCORES:
        raise ValueError(f"scores must be one of 'softmax', 'sigmoid'; got {scores!r}.")
    return _route(logits, bias, experts_per_token, renormalize, scores)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _route(
    logits: jax.Array,
    bias: jax.Array | None,
    experts_per_token: int,
    renormalize: bool,
    scores: Scores,
) -> Routing:
    if scores == "softmax":
        s = probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        s = jax.nn.sigmoid(logits)
        # s / sum s, also where all s are below the smallest f32.
        probabilities = jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)
    chosen = _largest(s if bias is None else s + bias[None], experts_per_token)
    experts = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    of_chosen = lambda x: jnp.sum(jnp.where(chosen, x[:, None], 0), axis=-1)
    weights = of_chosen(s)
    if renormalize and scores == "softmax":
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    elif renormalize:
        weights = jax.nn.softmax(jax.nn.log_sigmoid(of_chosen(logits)), axis=-1)
    order = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    indices = jnp.arange(order.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
    group_sizes = jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
    return Routing(weights, experts, probabilities, group_sizes, order, places, logits)


def _largest(scores: jax.Array, k: int) -> jax.Array:
    """Which are the `k` largest of each row, the largest first: bool[..., k, g].

    As ``jax.lax.top_k``, for which the compiler would gather all rows on every device.
    """
    found: list[jax.Array] = []
    for _ in range(k):
        found.append(jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=bool))
        scores = jnp.where(found[-1], -jnp.inf, scores)
    return jnp.stack(found, axis=-2)


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


def sequence_balance_loss(routing: Routing, sequence_length: int) -> jax.Array:
    """How unevenly the tokens of each sequence go to the experts, f32[]; the mean over sequences.

    ::

        loss = sum_i f_i P_i      f_i = g / (k T) * count of tokens with s_i among their k largest
                                  P_i = mean over the sequence of s_i / sum_j s_j

    A sequence has ``T`` tokens. Choices are counted as the scores alone would make them, without
    a bias. The gradient goes through ``P_i``. It is 1 if all is even. DeepSeek-V3 adds 0.0001
    times it, beside a bias (see `updated_bias`).

    Args:
      routing: of whole sequences, one after the other.
      sequence_length: ``T``.

    Raises:
      ValueError: `sequence_length` does not divide the tokens.

    References:
      DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
    """
    tokens, groups = routing.probabilities.shape
    if sequence_length < 1 or tokens % sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length} must divide the {tokens} tokens that were routed, "
            "since the loss is one of whole sequences. Pass the length of one sequence."
        )
    k = routing.experts.shape[1]
    p = routing.probabilities.reshape(tokens // sequence_length, sequence_length, groups)
    f = groups / k * jnp.mean(jnp.sum(_largest(p, k), axis=-2), axis=1)
    losses = jnp.sum(f * jnp.mean(p, axis=1), axis=-1)
    return jnp.sum(losses) / max(len(losses), 1)


def router_z_loss(logits: jax.Array) -> jax.Array:
    """``mean over tokens of log(sum_i exp logits_i)^2``, f32[]: keeps the router's logits small.

    Args:
      logits: f32[t, g]; those of a `Routing` are its ``logits``.

    References:
      ST-MoE, arXiv 2202.08906, equation 5, which adds 0.001 times it to the loss.
    """
    z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jnp.sum(z**2) / max(len(z), 1)


def updated_bias(bias: jax.Array, group_sizes: jax.Array, rate: float) -> jax.Array:
    """The bias after a step: down for experts that got more tokens than the mean, up for others.

    ::

        bias_e + rate * sign(mean load - load_e)

    The load of an expert is how many tokens chose it. Devices that see parts of the batch, in
    ``jax.shard_map`` or ``jax.pmap``, add up their loads, and so agree on the bias.

    Args:
      bias: f32[g].
      group_sizes: i32[g], the loads.
      rate: how far a bias moves in a step; 0.001 in the papers.

    Returns:
      f32[g].

    References:
      arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    load = group_sizes.astype(jnp.float32)
    axes = axes_apart(load, bias)
    load = lax.psum(load, axes) if axes else load
    # Without a division, which might round, an expert with the mean load stays where it is.
    return bias + rate * jnp.sign(jnp.sum(load) - load.shape[0] * load)
