"""State whose gradient is its new value, for training loops that know nothing of FP8.

Flax's ``TrainState``, Keras, and trainers such as MaxText, replace some variables by their
gradients. So all state of a matmul is one such variable, and its gradient is what the
product has to remember.

JAX adds cotangents of several uses, and loops average them over micro-batches and devices. What is
remembered must survive that, so it is written in ones and zeros, as in a sink: the entries that are
not zero are the same after any positive combination. The variable is ``f32[3 * (2050 + 31 H)]``, a
row each for lhs, rhs and grad:

  * 2050 entries hold the amax of the last step, see `jfp8.scaling.sink`;
  * 31 for each of the H steps before it hold the bits of that amax, the lowest first.

The next step reads a history from both, the last amax in front. One dimension, so that layers can
be stacked along any axis that vectors have.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.history import AmaxState, push_amax
from jfp8.scaling.sink import ROLES, SINK_UNIT, WIDTH, decode_amax, init_sink

_BITS = 31  # an amax has no sign


def init_overwritten(empty: Mapping[str, AmaxState]) -> jax.Array:
    """Return the variable before the first step: zeros.

    Args:
      empty: ``recipe.init_state()``.

    Returns:
      f32[3 * (2050 + 31 H)], with the longest of the three histories' lengths for H.
    """
    length = max(empty[role]["amax_history"].shape[-1] for role in ROLES)
    return jnp.zeros((len(ROLES) * (WIDTH + _BITS * length),), jnp.float32)


def read_overwritten(
    variable: jax.Array, empty: Mapping[str, AmaxState] | None = None
) -> tuple[dict[str, AmaxState], jax.Array]:
    """Read the histories in `variable`, and a sink; its gradient is its next value.

    Args:
      variable: f32[3 * (2050 + 31 H)].
      empty: ``recipe.init_state()``, which gives the lengths; with None all have the longest.

    Returns:
      ``(state, sink)``, as `jfp8.scaled_dot_general` takes them.

    Raises:
      ValueError: `variable` has no such shape, or too few steps.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> recipe, x, w = jfp8.recipes.DelayedScaling(), jnp.ones((2, 3)), jnp.full((3, 4), 2.0)
    >>> def loss(w, variable):
    ...     state, sink = jfp8.scaling.read_overwritten(variable, recipe.init_state())
    ...     numbers = (((1,), (0,)), ((), ()))
    ...     return jfp8.scaled_dot_general(x, w, numbers, state=state, sink=sink).sum()
    >>> variable = jfp8.scaling.init_overwritten(recipe.init_state())
    >>> grad, variable = jax.grad(loss, argnums=(0, 1))(w, variable)
    >>> state, _ = jfp8.scaling.read_overwritten(variable)
    >>> float(state["rhs"]["amax_history"][0])
    2.0
    """
    longest = steps_of(variable.shape)
    lengths = {r: empty[r]["amax_history"].shape[-1] if empty else longest or 0 for r in ROLES}
    if not longest or max(lengths.values()) != longest:
        needed = "" if empty is None else f"; {init_overwritten(empty).shape} is needed"
        raise ValueError(
            f"The state has shape {variable.shape}{needed}. It belongs to another recipe, or to "
            "Flax's own FP8 layers. Make a new one, with init of the model or the function."
        )
    histories, sink = _read(variable)
    histories = lax.stop_gradient(histories)  # `variable` receives the gradient of the sink
    states = {
        role: {"amax_history": row[: lengths[role]], "amax": jnp.zeros((), jnp.float32)}
        for role, row in zip(ROLES, histories, strict=True)
    }
    return states, sink


def steps_of(shape: tuple[int, ...]) -> int | None:
    """Return the history length H of a variable of this shape, or None for other shapes."""
    if len(shape) != 1 or shape[0] % len(ROLES):
        return None
    steps, rest = divmod(shape[0] // len(ROLES) - WIDTH, _BITS)
    return steps if steps > 0 and rest == 0 else None


@jax.custom_vjp
def _read(variable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the histories, f32[3, H], and an empty sink."""
    return _read_forward(variable)[0]


def _read_forward(variable):
    rows = variable.reshape(len(ROLES), -1)
    amaxes, _ = decode_amax(rows[:, :WIDTH])
    older = rows[:, WIDTH:].reshape(len(ROLES), -1, _BITS)
    ones = ((older > 0) | (older < 0)).astype(jnp.uint32)  # NaN is neither
    patterns = jnp.sum(ones << _places(ones.shape), axis=-1, dtype=jnp.uint32)
    histories = push_amax(lax.bitcast_convert_type(patterns, jnp.float32), amaxes)
    # Computed from the variable, so that under ``vmap`` each variable has a sink.
    no = jnp.zeros((len(ROLES), WIDTH), bool)
    return (histories, lax.select(no, rows[:, :WIDTH], init_sink())), histories


def _read_backward(histories, cotangents):
    _, sink = cotangents  # in units of SINK_UNIT
    patterns = lax.bitcast_convert_type(histories, jnp.uint32)[..., None]
    bits = patterns >> _places((*histories.shape, _BITS)) & np.uint32(1)
    older = bits.astype(jnp.float32).reshape(len(ROLES), -1) * SINK_UNIT
    return (jnp.concatenate([sink, older], axis=-1).reshape(-1),)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Return the place of each bit, along the last dimension."""
    return lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)


_read.defvjp(_read_forward, _read_backward)
