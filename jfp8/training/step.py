"""`value_and_grad`: loss and gradients of one step, over all of its micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ApplyScopeInvalidVariablesStructureError

from jfp8.optim.finite import scaled, unscaled
from jfp8.optim.fp8_params import carriers, with_carriers, without_stored
from jfp8.optim.loss_scale_state import loss_scale_in
from jfp8.optim.wrapping import has_master_weights
from jfp8.scaling.history import as_dicts
from jfp8.scaling.sink import SMALL
from jfp8.tracing.loss import LOSS, Loss
from jfp8.training.micro_batches import over_parts_of_arguments
from jfp8.training.model_histories import add_recorded, init_sinks, read_by_step
from jfp8.training.other_model import instead_of_state
from jfp8.training.state import Gradients, TrainState

# Collections of Flax that need not be in the state: the model's results for them are dropped.
FLAX_COLLECTIONS = ("batch_stats", "cache", "fp8", "intermediates", "losses", "perturbations")


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
    batch_axes: Mapping[str, None] | None = None,
) -> Callable[..., tuple[Any, Gradients]]:
    """Differentiate as ``jax.value_and_grad``, for a `TrainState` and one batch.

    The loss is multiplied by the loss scale, if the optimizer has one; the returned loss and
    gradient do not contain it. The amaxes of the backward pass are part of the gradient.

    Args:
      loss_fn: ``(variables, batch) -> loss``, or ``(loss, mutated)``, or with `has_aux` ``(loss,
        mutated, aux)``. ``variables`` are all collections for ``model.apply``; ``mutated`` are the
        collections that it returned as mutated, ``{}`` if none. The ones in the state are
        carried over; return others, such as ``intermediates``, as ``aux``. The batch may be several
        arguments, ``(variables, x, y)``.
      has_aux: True if `loss_fn` returns a third value.
      micro_batches: split the batch's leading axis into this many parts, run these one by one, and
        average losses and gradients: the same step in less memory. All parts use the same scales,
        and the histories get one entry, the largest amax. Weights are quantized once for all parts
        (not over explicit axes), and gradients are summed in f32. Part ``i`` has the rows ``i``,
        ``i + micro_batches``, ..., so that all devices of a sharded batch take part in each.
      batch_axes: arrays that every micro-batch gets whole, by the name of an argument of `loss_fn`
        or of a key in the batch: ``{"class_weights": None}``. Scalars need no name.

    Returns:
      ``(state, batch) -> (loss, grads)``, or ``((loss, aux), grads)`` with `has_aux`; with several
      micro-batches ``aux`` has a leading axis of that size. It takes as many arguments for the
      batch as `loss_fn`.

    Raises:
      TypeError: the first argument is not a `TrainState`.
      ValueError: `micro_batches` below 1 or not dividing the batch; leading axes that differ, if
        there are several micro-batches; `loss_fn` returns another type.

    >>> import jax, jax.numpy as jnp, jfp8, optax
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    >>> loss_fn = lambda variables, x: (jnp.mean(model.apply(variables, x) ** 2), {})
    >>> loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
    >>> state.apply_gradients(grads).step
    Array(1, dtype=int32)
    """
    check_micro_batches(micro_batches)

    def compute(state: TrainState, *batch: Any, **named: Any) -> tuple[Any, Gradients]:
        if not isinstance(state, TrainState):
            raise TypeError(instead_of_state(state))
        check_examples((batch, named), lambda: loss_fn(state.variables, *batch, **named))
        loss_scale = loss_scale_in(state.opt_state)
        differentiated, stored = state.params, None
        if state.has_stored_params:
            by_values, stored = has_master_weights(state.opt_state), state.params
            differentiated = (carriers if by_values else without_stored)(stored)
        known = (differentiated, init_sinks(state.fp8), read_by_step(state.fp8))
        gradient = _gradient(loss_fn, has_aux, loss_scale, stored)
        if micro_batches > 1:
            options = (loss_fn, micro_batches, batch_axes or {})
            gradient = partial(over_parts_of_arguments, gradient, *options)
        with LOSS(Loss(loss_scale is not None, "optax.chain(jfp8.loss_scale(), tx)")):
            found = gradient(*known, state.collections, (batch, named))
        (grads, sink), (loss, collections, aux) = found
        sink = jax.tree.map(lambda rows: rows * SMALL, sink)
        grads, small = unscaled(grads, loss_scale), jnp.asarray(loss, jnp.float32) * SMALL
        gradients = Gradients(grads, sink, collections, small)
        return ((loss, aux) if has_aux else loss), gradients

    return compute


def check_micro_batches(n: Any) -> None:
    """Raise ``ValueError`` unless `n` is an int of at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"micro_batches must be an int of at least 1, got {n!r}.")


def _gradient(
    loss_fn: Callable[..., Any], has_aux: bool, loss_scale: jax.Array | None, stored: Any
) -> Callable[..., Any]:
    """Return a function to the gradients of the scaled loss, and ``(loss, collections, aux)``.

    If parameters are `stored` in FP8, not all of them are differentiated.
    """

    def scaled_loss(differentiated: Any, sinks: Any, fp8: Any, collections: Any, batch: Any) -> Any:
        args, named = batch
        params = differentiated if stored is None else with_carriers(stored, differentiated)
        variables = {"params": params}
        if fp8:
            variables |= {"fp8": fp8, "fp8_sink": sinks}
        try:
            returned = loss_fn({**variables, **collections}, *args, **named)
        except ApplyScopeInvalidVariablesStructureError as error:
            error.add_note(
                "jfp8.value_and_grad passes loss_fn all variables, not params alone. Pass them on "
                "as they are: model.apply(variables, x)."
            )
            raise
        loss, mutated, aux = _unpacked(returned, has_aux)
        _check_names(mutated, None if has_aux else {*variables, *collections, *FLAX_COLLECTIONS})
        new = {name: mutated.get(name, value) for name, value in collections.items()}
        loss = jnp.asarray(loss)
        return scaled(loss, loss_scale), ((loss, new, aux), as_dicts(mutated.get("fp8", {})))

    def compute(*arguments: Any) -> Any:
        (grads, sinks), (aux, recorded) = gradient(*arguments)
        return (grads, add_recorded(sinks, recorded)), aux

    gradient = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
    return compute


def _unpacked(returned: Any, has_aux: bool) -> tuple[Any, Mapping[str, Any], Any]:
    """Return the result of `loss_fn` as (loss, mutated, aux), or raise for another type."""
    if not has_aux and isinstance(returned, jax.Array | np.ndarray | np.generic | int | float):
        return returned, {}, None
    wanted = "(loss, mutated, aux)" if has_aux else "(loss, mutated)"
    is_tuple = isinstance(returned, tuple)
    if not is_tuple or len(returned) != 2 + has_aux:
        given = f"a tuple of {len(returned)}" if is_tuple else type(returned).__name__
        raise ValueError(
            f"loss_fn must return {wanted} when has_aux={has_aux}, but returned {given}. mutated "
            "are the collections that model.apply(..., mutable=[...]) returned, {} if none."
        )
    loss, mutated, aux = returned if has_aux else (*returned, None)
    if not isinstance(mutated, Mapping):
        raise ValueError(
            f"loss_fn must return {wanted} with a dict of collections as mutated ({{}} if none), "
            f"but mutated is {type(mutated).__name__}."
            + " To return more, use has_aux=True and (loss, mutated, aux)."
            * (not has_aux)
        )
    return loss, mutated, aux


def _check_names(mutated: Mapping[str, Any], known: set[str] | None) -> None:
    """Raise an error if `mutated` has sinks, or an entry that is not `known`, such as metrics."""
    if "fp8_sink" in mutated:
        raise ValueError(
            "loss_fn made the 'fp8_sink' collection mutable, which cuts it off from the gradient, "
            "so no history would be updated. Name the collections that are updated, e.g. "
            "model.apply(..., mutable=['batch_stats']), not mutable=True."
        )
    if known is not None and (unknown := sorted(map(str, set(mutated) - known))):
        raise ValueError(
            f"loss_fn returned (loss, mutated) with {unknown} in mutated, which the state has no "
            "collections for, so they would be lost. To return metrics or other values, use "
            "jfp8.value_and_grad(loss_fn, has_aux=True), and return (loss, mutated, aux) from "
            "loss_fn, with {} as mutated if the model updates no collection."
        )


def check_examples(batch: Any, loss: Callable[[], Any] | None = None) -> None:
    """Raise ``ValueError`` if all arrays of `batch` have no examples, and `loss` divides by 0."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if sizes == {0} and (loss is None or re.search(r" div \S+ 0\.0", str(jax.make_jaxpr(loss)()))):
        raise ValueError(
            "The batch has no examples: the leading axis of each of its arrays is 0, so that a "
            "mean over it is NaN. Leave such a batch out, or pad it and mask what was added."
        )
