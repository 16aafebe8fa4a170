"""`metrics`: scalars about a training state, for any logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.optim.loss_scale_state import find_loss_scale
from jfp8.scaling.history import as_dicts, as_read
from jfp8.scaling.sink import ROLES
from jfp8.training.model_histories import is_product, over_products
from jfp8.training.skipped import tell
from jfp8.training.state import TrainState

# Growth by a sixteenth is within the rounding of the largest values.
_SATURATED = 1 + 2**-4


def metrics(
    state: TrainState, *, per_tensor: bool = False, warn: bool = False
) -> dict[str, jax.Array]:
    """Return scalars about the last steps for a logger, inside and outside ``jit``.

    ===================== ===================================================================
    ``loss_scale``        the loss scale, if the optimizer has one
    ``skipped_steps``     number of skipped steps
    ``skipped_in_a_row``  number of the last ones that were
    ``worst_ratio``       the largest ratio, over all tensors, of an amax to the one that its
                          history predicted: above 1, the step clipped that tensor, unless the
                          recipe has a margin
    ``saturated_matmuls`` number of matmuls with a ratio above 17/16, beyond rounding
    ``empty_histories``   number of tensors whose history was empty, so that scales were current
    ===================== ===================================================================

    They follow from the state alone, and describe the last step that was not skipped. For an NNX
    model call `jfp8.nnx.Optimizer.metrics`.

    Args:
      state: the state after a step. Compute the metrics in the compiled step.
      per_tensor: add the ratio of each tensor under its name, such as ``ratio/layers_0/lhs``; of
        stacked layers the largest.
      warn: inside ``jit``, warn while the program runs, by a callback that no other step calls, of
        what is told outside ``jit`` in any case: the last 10 steps were skipped, or the loss scale
        is at its least value.

    Returns:
      f32[] by name.

    Raises:
      TypeError: `state` is no `TrainState`.

    >>> import jax, jax.numpy as jnp, jfp8, optax
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    >>> jfp8.metrics(state)["empty_histories"]
    Array(3., dtype=float32)
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"jfp8.metrics takes a jfp8.TrainState, got {type(state).__name__}. For an NNX model: "
            "optimizer.metrics(model), of optimizer = jfp8.nnx.Optimizer(model, tx)."
        )
    found = jax.tree.leaves_with_path(as_dicts(state.fp8), is_leaf=is_product)
    histories = {
        jax.tree_util.keystr(path, simple=True, separator="/"): {
            role: product[role]["amax_history"] for role in ROLES
        }
        for path, product in found
    }
    counters = state.skipped_steps, state.skipped_in_a_row
    return metrics_of(*counters, state.opt_state, histories, per_tensor, warn)


def metrics_of(
    skipped_steps: jax.Array,
    skipped_in_a_row: jax.Array,
    opt_state: Any,
    histories: Mapping[str, Mapping[str, jax.Array]] | None,
    per_tensor: bool,
    warn: bool,
) -> dict[str, jax.Array]:
    """Return the metrics of a state whose `histories` are f32[..., H] by matmul and role."""
    tell(skipped_in_a_row, opt_state, at_once=warn)
    scale = find_loss_scale(opt_state)
    found: dict[str, Any] = {
        "skipped_steps": skipped_steps,
        "skipped_in_a_row": skipped_in_a_row,
    }
    if scale is not None:
        found["loss_scale"] = scale.loss_scale
    if histories is not None:
        of_matmuls = over_products(_ratios, [(each,) for each in histories.values()])
        flat = [ratios.reshape(-1, len(ROLES)) for ratios in of_matmuls]
        ratios = jnp.concatenate([jnp.zeros((0, len(ROLES))), *flat])
        found |= {
            "worst_ratio": jnp.max(ratios, initial=0.0),
            "saturated_matmuls": jnp.sum(jnp.any(ratios > _SATURATED, axis=1)),
            "empty_histories": jnp.sum(ratios == 0),
        }
        for path, part in zip(histories if per_tensor else (), flat, strict=False):
            largest = jnp.max(part, axis=0)
            found |= {f"ratio/{path}/{role}": largest[i] for i, role in enumerate(ROLES)}
    return {name: jnp.asarray(x, jnp.float32) for name, x in found.items()}


def _ratios(histories: Mapping[str, jax.Array]) -> jax.Array:
    """Return the newest amax of lhs, rhs and grad over the one that was expected, f32[..., 3].

    The scale of a step follows from the maximum of the entries before its own; 0 without any.
    """
    before = as_read({role: histories[role][..., 1:] for role in ROLES})
    expected = jnp.stack([jnp.max(before[r], axis=-1, initial=0.0) for r in ROLES], axis=-1)
    newest = jnp.stack([histories[role][..., 0] for role in ROLES], axis=-1)
    return jnp.where(expected > 0, newest / jnp.where(expected > 0, expected, 1.0), 0.0)
