"""`advance`: the end of a step in custom loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jfp8.optim.finite import keep_unless
from jfp8.optim.loss_scale_state import find_loss_scale
from jfp8.scaling.history import CHECK, as_dicts, intact_states, sealed
from jfp8.training.histories import Collections, close_step, decode_all, map_products, rescaled


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
        the state of one product, as `scaled_dot_general` takes it.
      sink_cotangent: the tree of gradients with respect to the ``fp8_sink`` collection, or that to
        the sink of one product. A product that is missing from it (a frozen layer) keeps what `fp8`
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
    if not isinstance(sink_cotangent, Mapping):
        sink_cotangent = {} if sink_cotangent is None else {"amax": sink_cotangent}
    amaxes, overflow = decode_all(as_dicts(sink_cotangent))
    old = map_products(lambda product: {**product, **intact_states(product)}, as_dicts(fp8))
    new = close_step(old, amaxes)
    if opt_states is None:
        return new
    before, after = map(find_loss_scale, opt_states)
    if before is None and after is None:
        return new
    if before is None or after is None:
        raise ValueError(
            "advance(opt_states=...): only one of the two states has a loss scale. Pass those of "
            "one optimizer: opt_states=(opt_state, new_opt_state), of "
            "updates, new_opt_state = tx.update(grads, opt_state, params)."
        )
    kept = keep_unless(after.grads_finite & ~overflow, new, old)
    return rescale_grad_histories(kept, after.loss_scale / before.loss_scale)


def rescale_grad_histories(fp8: Collections, ratio: jax.Array) -> Collections:
    """Multiply every gradient amax in `fp8` by `ratio` = new / old loss scale.

    Gradients carry the loss scale, so their history must follow it, or every growth saturates.
    """

    def rescale(product: Any) -> Any:
        new = dict(intact_states(product))
        new["grad"] = jax.tree.map(lambda amaxes: rescaled(amaxes, ratio), new["grad"])
        return sealed(new) if CHECK in product else new

    return map_products(rescale, fp8)
