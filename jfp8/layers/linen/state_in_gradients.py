"""The collection ``_overwrite_with_gradient``: state whose gradient is its next value.

See `jfp8.scaling.state_in_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.core import meta

from jfp8.scaling.history import sealed
from jfp8.scaling.sink import ROLES
from jfp8.scaling.state_in_gradients import read_overwritten, steps_of

StateCollection = Literal["fp8", "_overwrite_with_gradient"]
OVERWRITTEN: StateCollection = "_overwrite_with_gradient"
NAME = "state"  # name of the variable


def check_state_collection(name: str) -> None:
    """Raise ``ValueError`` unless `name` is a collection that may hold state."""
    if name not in ("fp8", OVERWRITTEN):
        raise ValueError(
            f"state_collection must be 'fp8' or {OVERWRITTEN!r}; got {name!r}. The second is for "
            "loops that replace its variables by their gradients, such as Flax's own TrainState."
        )


def histories_in(collection: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``fp8`` collection equivalent to the collection ``_overwrite_with_gradient``.

    Use it to inspect the histories, or to continue with `jfp8.TrainState`.

    Args:
      collection: with the state of matmuls, in boxes of metadata or not, stacked or not.

    Returns:
      ``{path: {"lhs", "rhs", "grad"}}`` of amax histories, and their check, with a
      leading axis for each axis along which layers are stacked.

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
        axes = [i for i, n in enumerate(jnp.shape(node)) if steps_of((n,)) is not None]
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
