"""State whose gradient is its new value, for training loops that know nothing of FP8.

Flax's ``TrainState``, and trainers such as MaxText, replace each variable of the collection
``_overwrite_with_gradient`` by its gradient. So all state of a product is one such variable, and
the gradient by it is what the product has to remember.

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
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax import lax

from jfp8.scaling.history import AmaxState, push_amax, sealed
from jfp8.scaling.sink import ROLES, SINK_UNIT, WIDTH, decode_amax, init_sink

StateCollection = Literal["fp8", "_overwrite_with_gradient"]
OVERWRITTEN: StateCollection = "_overwrite_with_gradient"
NAME = "state"  # of the variable
UNCHANGED = (  # a warning where the collection is mutable
    "apply returns the collection '_overwrite_with_gradient' as it was: its gradient is its next "
    "value. A loop that keeps what apply returns, such as Kauldron's, records no amax: leave out "
    "state_collection there. In others, mutable=flax.core.DenyList('_overwrite_with_gradient')."
)

_BITS = 31  # an amax has no sign


def check_state_collection(name: str) -> None:
    """Raise ``ValueError`` unless `name` is that of a collection in which state may be."""
    if name not in ("fp8", OVERWRITTEN):
        raise ValueError(
            f"state_collection must be 'fp8' or {OVERWRITTEN!r}; got {name!r}. The second is for "
            "loops that replace its variables by their gradients, such as Flax's own TrainState."
        )


def init_overwritten(empty: Mapping[str, AmaxState]) -> jax.Array:
    """Return the variable before the first step, where `empty` is ``recipe.init_state()``."""
    length = max(empty[role]["amax_history"].shape[-1] for role in ROLES)
    return jnp.zeros((len(ROLES) * (WIDTH + _BITS * length),), jnp.float32)


def read_overwritten(
    variable: jax.Array, empty: Mapping[str, AmaxState] | None = None
) -> tuple[dict[str, AmaxState], jax.Array]:
    """The histories that `variable` holds, and a sink whose gradient the next value comes from.

    Args:
      variable: f32[3 * (2050 + 31 H)].
      empty: ``recipe.init_state()``, which gives the lengths; None: all have the longest.

    Raises:
      ValueError: `variable` has no such shape, or too few steps.
    """
    longest = _steps(variable.shape)
    lengths = {r: empty[r]["amax_history"].shape[-1] if empty else longest or 0 for r in ROLES}
    if not longest or max(lengths.values()) != longest:
        needed = "" if empty is None else f"; {init_overwritten(empty).shape} is needed"
        raise ValueError(
            f"The state in {OVERWRITTEN!r} has shape {variable.shape}{needed}. It belongs to "
            "another recipe, or to Flax's own FP8 layers. Make a new one with model.init."
        )
    histories, sink = _read(variable)
    states = {
        role: {"amax_history": row[: lengths[role]], "amax": jnp.zeros((), jnp.float32)}
        for role, row in zip(ROLES, histories, strict=True)
    }
    return states, sink


def histories_in(collection: Mapping[str, Any]) -> dict[str, Any]:
    """The ``fp8`` collection that holds what the collection ``_overwrite_with_gradient`` does.

    To look at the histories, or to go on with `jfp8.TrainState`.

    Args:
      collection: with the state of products, in boxes of metadata or not, stacked or not.

    Returns:
      ``{path: {"lhs", "rhs", "grad"}}`` of `jfp8.scaling.AmaxState`, and their check, with one
      leading axis for each along which layers are stacked.

    Raises:
      ValueError: something else is in the collection.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> layer = jfp8.Dense(4, state_collection="_overwrite_with_gradient")
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> fp8 = jfp8.linen.histories_in(variables["_overwrite_with_gradient"])
    >>> fp8["DotGeneral_0"]["lhs"]["amax_history"].shape
    (16,)
    """
    found: dict[str, Any] = {}
    for name, node in meta.unbox(dict(collection)).items():
        if isinstance(node, Mapping):
            inner = histories_in(node)
            found |= inner if set(ROLES) <= set(inner) and name == NAME else {name: inner}
            continue
        axes = [i for i, n in enumerate(jnp.shape(node)) if _steps((n,)) is not None]
        if name != NAME or len(axes) != 1:
            raise ValueError(
                f"{OVERWRITTEN!r} holds {name!r} of shape {jnp.shape(node)}, which is no state of "
                "a layer of jfp8. Histories of Flax's own FP8 layers are imported by "
                "jfp8.checkpoint.from_flax_fp8_ops(variables, target)."
            )
        read = lambda variable: sealed(read_overwritten(variable)[0])
        for _ in range(jnp.ndim(node) - 1):
            read = jax.vmap(read)
        found |= read(jnp.moveaxis(node, axes[0], -1))
    return found


def _steps(shape: tuple[int, ...]) -> int | None:
    """Return the H of a variable of this shape; None: it has no such shape."""
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
    return (histories, init_sink()), histories


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
