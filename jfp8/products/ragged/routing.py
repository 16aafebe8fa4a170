"""Routes tokens to experts and their results back: the formulas of a mixture of experts.

Functions of arrays, without a framework. No token is dropped: an expert gets all that choose it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.tracing.compat import axes_apart

Scores = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Routing(NamedTuple):
    """Destinations of ``t`` tokens: a copy of each goes to ``k`` of ``g`` experts.

    Attributes:
      weights: f32[t, k], how much of each chosen expert's result a token gets.
      experts: i32[t, k], the chosen experts, the most probable first.
      probabilities: f32[t, g], the router's, of all experts: their scores, divided by the sum of a
        token's.
      group_sizes: i32[g], how many copies go to each expert.
      order: i32[t * k], for each place among all copies, sorted by expert, the copy that is there;
        copy ``i`` belongs to token ``i // k`` and its choice ``i % k``.
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
    bias: jax.Array | None = None,
    scores: Scores = "softmax",
    renormalize: bool | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """Return the `experts_per_token` experts of each token whose score and bias are largest. ::

        s = softmax(logits), sigmoid(logits) or sqrt(softplus(logits))
        chosen = top k of s + bias, among the experts of the best groups
        weights = routed_scaling_factor * s_chosen, or s_chosen / sum s_chosen for s_chosen

    The bias only decides which experts are chosen: it is in no weight and has no gradient.

    Args:
      logits: f32[t, g].
      experts_per_token: ``k``.
      bias: f32[g] or None, see `updated_bias`.
      scores: ``"softmax"``: experts compete for a token; ``"sigmoid"`` and ``"sqrtsoftplus"``: each
        is scored by itself.
      renormalize: make the weights of a token sum to 1, before they are scaled; None: with more
        than one expert per token. (With one they are then all 1, and the router gets no gradient
        through them.)
      n_group: consecutive experts form so many groups of equal size.
      topk_group: how many groups a token may choose from: those whose two largest ``s + bias`` have
        the largest sum.
      routed_scaling_factor: factor of all weights.

    Returns:
      A `Routing`.

    Raises:
      ValueError: `experts_per_token` is not from 1 to ``g``, or more than are in the groups that a
        token may choose from; groups of different sizes; unknown `scores`.

    References:
      DeepSeek-V3, arXiv 2412.19437, equations 12 to 16, for sigmoid, bias and groups. The names are
      its configuration's in transformers. DeepSeek-V4 has sqrtsoftplus.
    """
    experts = logits.shape[1]
    if not 1 <= experts_per_token <= experts:
        raise ValueError(
            f"experts_per_token={experts_per_token} must be from 1 to the number of experts, "
            f"{experts}."
        )
    fits = n_group >= 1 and not experts % n_group and 1 <= topk_group <= n_group
    if not fits or experts_per_token > experts // n_group * topk_group:
        raise ValueError(
            f"n_group={n_group} must divide the {experts} experts, and topk_group={topk_group} be "
            f"from 1 to n_group; so many groups must have {experts_per_token} experts for a token."
        )
    if scores not in _LOG_SCORES:
        allowed = ", ".join(map(repr, _LOG_SCORES))
        raise ValueError(f"scores must be one of {allowed}; got {scores!r}.")
    log_scores = _LOG_SCORES[scores](logits)
    s = jnp.exp(log_scores)
    for_choice = s if bias is None else s + bias[None]
    if topk_group < n_group:
        for_choice = _in_best_groups(for_choice, n_group, topk_group)
    chosen = largest(for_choice, experts_per_token)
    of_chosen = lambda x: jnp.sum(jnp.where(chosen, x[:, None], 0), axis=-1)
    weights = of_chosen(s)
    if experts_per_token > 1 if renormalize is None else renormalize:
        # s / sum s, also where all s are below the smallest f32.
        weights = jax.nn.softmax(of_chosen(log_scores), axis=-1)
    probabilities = jax.nn.softmax(log_scores, axis=-1)
    experts = jnp.argmax(chosen, axis=-1)
    return routing_of(routed_scaling_factor * weights, experts, probabilities, logits)


def routing_of(
    weights: jax.Array, experts: jax.Array, probabilities: jax.Array, logits: jax.Array
) -> Routing:
    """Return the `Routing` of these choices, for a router that you write.

    Args:
      weights, experts: f32[t, k] and i32[t, k], for each token and each of its experts.
      probabilities, logits: f32[t, g], of all experts.

    Returns:
      A `Routing`; see its attributes.
    """
    experts = experts.astype(jnp.int32)
    order = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    indices = jnp.arange(order.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
    chosen = jax.nn.one_hot(experts, logits.shape[1], dtype=bool)
    group_sizes = jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
    return Routing(weights, experts, probabilities, group_sizes, order, places, logits)


def _log_sqrt_softplus(x: jax.Array) -> jax.Array:
    # Below, softplus(x) is e^x to f32, and its logarithm has no gradient where it vanishes.
    return 0.5 * jnp.where(x < -20, x, jnp.log(jax.nn.softplus(jnp.maximum(x, -20))))


_LOG_SCORES: dict[Scores, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.log_softmax,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrtsoftplus": _log_sqrt_softplus,
}


def _in_best_groups(scores: jax.Array, n_group: int, topk_group: int) -> jax.Array:
    """Return `scores`, with -inf outside the groups whose two largest have the largest sum."""
    in_groups = scores.reshape(len(scores), n_group, -1)
    best = largest(in_groups, min(2, in_groups.shape[2]))
    sums = jnp.sum(jnp.where(best, in_groups[:, :, None], 0), axis=(2, 3))
    allowed = jnp.any(largest(sums, topk_group), axis=1)
    return jnp.where(allowed[:, :, None], in_groups, -jnp.inf).reshape(scores.shape)


def largest(scores: jax.Array, k: int) -> jax.Array:
    """Return which are the `k` largest of each row, the largest first: bool[..., k, g].

    As ``jax.lax.top_k``, for which the compiler would gather all rows on every device.
    """
    found: list[jax.Array] = []
    for _ in range(k):
        found.append(jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=bool))
        scores = jnp.where(found[-1], -jnp.inf, scores)
    return jnp.stack(found, axis=-2)


def updated_bias(bias: jax.Array, group_sizes: jax.Array, rate: float) -> jax.Array:
    """Return the next bias: lower for experts with more tokens than the mean, higher for others.

    ::

        bias_e + rate * sign(mean load - load_e)

    The load of an expert is how many tokens chose it. Devices that see parts of the batch, in
    ``jax.shard_map`` or ``jax.pmap``, add up their loads, and so agree on the bias.

    References:
      arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    load = group_sizes.astype(jnp.float32)
    axes = axes_apart(load, bias)
    load = lax.psum(load, axes) if axes else load
    # Without a division, which might round, an expert with the mean load stays where it is.
    return bias + rate * jnp.sign(jnp.sum(load) - load.shape[0] * load)
