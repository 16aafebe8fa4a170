"""MaxText's gradient accumulation, with gradients of the state too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jfp8.integrations.maxtext.quantization import STATE

NAME = "jfp8_state"  # of the attribute of the model


def accumulating(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``gradient_accumulation_loss_and_grad`` replace the state by its gradient.

    MaxText differentiates with respect to parameters alone, so the state goes in as one more. The
    sum over micro-batches and the division by the number of tokens do not change what it says.
    """

    @wraps(accumulate)
    def with_state(
        loss_fn: Any, config: Any, model: Any, params: Any, params_shardings: Any, *more: Any
    ) -> Any:
        state = nnx.state(model, nnx.variable_type_from_name(STATE, allow_register=True))
        if not jax.tree.leaves(state):
            return accumulate(loss_fn, config, model, params, params_shardings, *more)
        values, tree = jax.tree.flatten(state)
        count = range(len(values))

        @wraps(loss_fn)
        def loss_of(model: Any, *args: Any, **kwargs: Any) -> Any:
            held = getattr(model, NAME)
            given = [held[i].get_value().astype(jnp.float32) for i in count]
            nnx.update(model, jax.tree.unflatten(tree, given))
            return loss_fn(model, *args, **kwargs)

        everywhere = NamedSharding(jax.tree.leaves(params_shardings)[0].mesh, PartitionSpec())
        own = nnx.Dict({NAME: nnx.List([nnx.Param(everywhere) for _ in values])})
        shardings = nnx.merge_state(params_shardings, nnx.state(own))
        setattr(model, NAME, nnx.List([nnx.Param(value) for value in values]))
        loss, aux, grads = accumulate(loss_of, config, model, params, shardings, *more)
        delattr(model, NAME)
        new = [grads[NAME][i].get_value().astype(jnp.float32) for i in count]
        nnx.update(model, jax.tree.unflatten(tree, new))
        del grads[NAME]
        return loss, aux, grads

    return with_state
