"""Continue training with another model and keep matching histories; or note another optimizer."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfp8.scaling.history import CHECK, as_dicts, intact_states, sealed
from jfp8.scaling.sink import ROLES
from jfp8.scaling.trees import is_scaled_array
from jfp8.training.model_histories import Collections, is_product


def histories_for(model: nn.Module, args: Any, kwargs: Any, state: Any) -> Collections:
    """Return the ``fp8`` collection of ``state.with_model(model, *args, **kwargs)``."""
    try:
        shapes = as_dicts(jax.eval_shape(partial(model.init, jax.random.key(0), **kwargs), *args))
    except TypeError as error:
        if not (args or kwargs):
            error.add_note("The inputs of model.init come next: state.with_model(model, x).")
        raise
    fp8 = shapes.pop("fp8", {})
    shapes.pop("fp8_sink", None)
    given = {"params": state.params, **state.collections}
    found, own = (_shapes_in(tree) for tree in (shapes, given))
    if different := {path for path, _ in found.items() ^ own.items()}:
        path = min(different)
        raise ValueError(
            f"with_model got a model of other variables: {path} is {found.get(path, 'missing')}"
            f" in it and {own.get(path, 'missing')} in the state. Pass the same model with "
            "another recipe, jfp8.convert(base, recipe), and inputs as for model.init."
        )
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fp8)
    return carried_over(empty, as_dicts(state.fp8))


def _shapes_in(variables: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(variables, is_leaf=is_scaled_array)
    spelled = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {spelled(path): tuple(jnp.shape(leaf)) for path, leaf in leaves}


def carried_over(empty: Any, old: Any) -> Any:
    """Fill `empty`, an ``fp8`` collection, with the newest entries of the same matmuls in `old`."""
    if not is_product(empty):
        return {name: carried_over(node, old.get(name, {})) for name, node in empty.items()}
    kept = {role: _resized(empty[role], state) for role, state in intact_states(old).items()}
    carried = {role: kept.get(role, empty[role]) for role in ROLES}
    return sealed(carried) if CHECK in empty else carried


def _resized(empty: Any, old: Any) -> Any:
    history, slots = old["amax_history"], empty["amax_history"]
    if history.shape[:-1] != slots.shape[:-1]:
        return empty
    kept = history[..., : slots.shape[-1]]
    return {**old, "amax_history": slots.at[..., : kept.shape[-1]].set(kept)}


def instead_of_state(given: Any) -> str:
    """Return the correct call, if `given` is not a `TrainState`."""
    if isinstance(given, nnx.Module):
        return (
            f"jfp8.value_and_grad got an NNX model, {type(given).__name__}. Use "
            "jfp8.nnx.value_and_grad(lambda model, x: ...)(model, x)."
        )
    return (
        f"jfp8.value_and_grad(loss_fn) takes a jfp8.TrainState first, got {type(given).__name__}. "
        "Create one from the whole result of model.init:\n"
        "    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)\n"
        "    loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)\n"
        "In a loop without it use jax.value_and_grad with respect to params and to the 'fp8_sink' "
        "collection, whose gradient jfp8.advance takes."
    )


def note_other_optimizer(
    error: Exception, tx: optax.GradientTransformation, opt_state: Any, params: Any
) -> None:
    """Add a note to an `error` of `tx` if `opt_state` is the state of another optimizer."""
    own, given = map(jax.tree.structure, (jax.eval_shape(tx.init, params), opt_state))
    if own != given:
        names = [", ".join(re.findall(r"namedtuple\[(\w+)", str(tree))) for tree in (own, given)]
        error.add_note(
            f"opt_state is of another optimizer: it has {names[1]}, and this one {names[0]}. "
            "Begin with tx.init(params), or restore the state of this optimizer."
        )
