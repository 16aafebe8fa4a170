"""The end of a step: each amax history gets one entry, if the step was finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfp8.optim.finite import all_of
from jfp8.optim.loss_scale_state import find_loss_scale
from jfp8.scaling.history import (
    CHECK,
    AmaxState,
    as_dicts,
    choose,
    ended,
    intact_states,
    observe,
    only_amaxes,
    sealed,
)
from jfp8.scaling.sink import ROLES, decode_amax
from jfp8.training.model_histories import Collections, map_products, merged, over_products


def advance(
    fp8: Collections,
    sink_cotangent: Collections | jax.Array | None = None,
    *,
    opt_states: tuple[optax.OptState, optax.OptState] | None = None,
) -> Collections:
    """End an optimizer step: every history gets one entry, the largest amax of the step.

    For custom loops; `TrainState.apply_gradients` does it by itself. Make ``fp8`` mutable, for
    the amaxes of activations and weights, and differentiate the loss with respect to the
    ``fp8_sink`` collection, for gradients' amaxes. If you accumulate or average gradients, do the
    same with its cotangent. Call this once per optimizer step. Without `opt_states`, skip the call
    when you skip the step.

    Args:
      fp8: the ``fp8`` collection: the one given to ``apply``, or the one it returned as mutated; or
        the state of one product, as `scaled_dot_general` takes it, or a dict of such states.
      sink_cotangent: the tree of gradients with respect to the ``fp8_sink`` collection, or to the
        sinks of these products. A product that is missing from it (a frozen layer) keeps what `fp8`
        itself recorded. None means all.
      opt_states: the optimizer's state before and after this step. Pass them if it contains a
        `jfp8.loss_scale`: gradients are then S times as large, and their histories are rescaled
        when S changes, since each growth of S would saturate gradients in the next step. A step
        that was not finite then changes nothing else. Without a loss scale they make no difference.

    Returns:
      The new ``fp8`` collection, of the same structure. Non-finite amaxes do not enter it, and a
      tensor that was all zero or did not take part keeps its history.

    Raises:
      ValueError: `sink_cotangent` has a product that `fp8` lacks; one of `opt_states` has a loss
        scale and the other has none.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> v = model.init(jax.random.key(0), x)
    >>> def loss(params, sink, fp8):
    ...     variables = {"params": params, "fp8": fp8, "fp8_sink": sink}
    ...     y, mutated = model.apply(variables, x, mutable=["fp8"])
    ...     return y.sum(), mutated["fp8"]
    >>> gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    >>> (grads, cotangent), fp8 = gradient(v["params"], v["fp8_sink"], v["fp8"])
    >>> fp8 = jfp8.advance(fp8, cotangent)
    >>> fp8["DotGeneral_0"]["lhs"]["amax_history"][:3]
    Array([1., 0., 0.], dtype=float32)
    """
    amaxes, overflow = decode_all({} if sink_cotangent is None else sink_cotangent)
    old = map_products(lambda product: {**product, **intact_states(product)}, as_dicts(fp8))
    growth = None if opt_states is None else growth_of(*opt_states)
    if opt_states is None or growth is None:
        return end_step(old, amaxes)
    after = find_loss_scale(opt_states[1])
    assert after is not None
    return end_step(old, amaxes, after.grads_finite & ~overflow, growth=growth)


def growth_of(before: optax.OptState, after: optax.OptState) -> jax.Array | None:
    """Return the factor of a step on the loss scale of an optimizer, f32[]; None without one."""
    old, new = find_loss_scale(before), find_loss_scale(after)
    if old is None and new is None:
        return None
    if old is None or new is None:
        raise ValueError(
            "advance(opt_states=...): only one of the two states has a loss scale. Pass those of "
            "one optimizer: opt_states=(opt_state, new_opt_state), of "
            "updates, new_opt_state = tx.update(grads, opt_state, params)."
        )
    return new.loss_scale / old.loss_scale


def decode_all(sinks: Any) -> tuple[Any, jax.Array]:
    """Decode every sink f32[..., 3, 2050] to amaxes f32[..., 3], and a flag of overflow."""
    leaves, structure = jax.tree.flatten(sinks)
    decoded = over_products(decode_amax, [(leaf,) for leaf in leaves])
    overflow = ~all_of([jnp.all(~overflows) for _, overflows in decoded])
    return structure.unflatten([amax for amax, _ in decoded]), overflow


def end_step(
    states: Collections,
    amaxes: Collections,
    finite: jax.Array | None = None,
    *,
    ends: jax.Array | None = None,
    growth: jax.Array | None = None,
) -> Collections:
    """End a step of all matmuls: every history gets one entry, the largest amax of the step.

    Args:
      states: an ``fp8`` collection, with the amaxes that were recorded in it.
      amaxes: the amaxes in its sinks, from `decode_all`, as ``{"amax": ...}`` or alone; a matmul
        may be missing.
      finite: bool[], False to skip the step, so that states stay bit for bit; None for True.
      ends: bool[], False while gradients accumulate, so that the step goes on; None for True.
      growth: f32[], the factor on the loss scale, which histories of gradients follow, also in a
        skipped step; None without a loss scale.

    Returns:
      The new collection.

    Raises:
      ValueError: `amaxes` has a matmul that `states` lacks.
    """

    def end(product: Any, amaxes: Any) -> Any:
        amaxes = amaxes.get("amax") if isinstance(amaxes, Mapping) else amaxes
        new = end_together({role: product[role] for role in ROLES}, amaxes, ends)
        new = sealed(new) if CHECK in product else new
        return new if growth is None else _with_rescaled_grads(new, growth)

    new = map_products(end, states, amaxes)
    old = states if growth is None else rescale_grad_histories(states, growth)
    return new if finite is None else merged(choose(finite, new, as_dicts(old)))


@jax.jit
def end_together(
    states: dict[str, AmaxState], amaxes: jax.Array | None, ends: jax.Array | None = None
) -> dict[str, AmaxState]:
    """Return the states of a matmul after a step; `amaxes` are f32[..., 3], in order of `ROLES`.

    All three at once, with a third of the operations and kernels. Shorter histories are padded.
    """
    lengths = {role: states[role]["amax_history"].shape[-1] for role in ROLES}
    axis, longest = states[ROLES[0]]["amax"].ndim, max(lengths.values())
    padding = lambda role: [(0, 0)] * axis + [(0, longest - lengths[role])]
    padded = [jnp.pad(states[role]["amax_history"], padding(role)) for role in ROLES]
    running = [states[role]["amax"] for role in ROLES]
    state = {"amax_history": jnp.stack(padded, axis), "amax": jnp.stack(running, axis)}
    state = state if amaxes is None else observe(state, amaxes)
    new = ended(state)
    if ends is not None:
        new = jax.tree.map(lambda x, old: jnp.where(ends, x, old), new, state)
    rows = {name: jnp.unstack(x, axis=axis) for name, x in new.items()}
    return {
        role: {"amax_history": rows["amax_history"][i][..., :length], "amax": rows["amax"][i]}
        for i, (role, length) in enumerate(lengths.items())
    }


def rescale_grad_histories(fp8: Collections, ratio: jax.Array) -> Collections:
    """Multiply every gradient amax in `fp8` by `ratio`, f32[]: new / old loss scale.

    Gradients carry the loss scale, so their history must follow it, or every growth saturates.
    """
    return map_products(lambda product: _with_rescaled_grads(product, ratio), fp8)


def _with_rescaled_grads(product: Any, ratio: jax.Array) -> Any:
    new = dict(intact_states(product))
    new["grad"] = jax.tree.map(lambda amaxes: rescaled(amaxes, ratio), new["grad"])
    return sealed(new) if CHECK in product else new


def rescaled(amaxes: jax.Array, factor: jax.typing.ArrayLike | None) -> jax.Array:
    """Multiply `amaxes` by `factor`, if any; they stay finite."""
    if factor is None:
        return amaxes
    largest = jnp.finfo(jnp.float32).max
    return jnp.minimum(only_amaxes(amaxes) * factor, largest).astype(amaxes.dtype)
