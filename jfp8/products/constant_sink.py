"""A sink that a loop of the user's own forgets to differentiate with respect to."""

from __future__ import annotations

from typing import Any

import jax

from jfp8.tracing.differentiation import warned_if_differentiated
from jfp8.tracing.notes import EXPLAINING


def told_if_constant(sink: jax.Array, *weights: Any) -> jax.Array:
    """Return `sink`; a derivative with respect to `weights` of its matmul, but not to it, warns."""
    if EXPLAINING.value is not None:
        return sink
    return warned_if_differentiated(
        sink,
        "A loss is differentiated with respect to a weight of an FP8 matmul, but not to its sink, "
        "so the amax of its gradient is not recorded. Differentiate with respect to 'fp8_sink' "
        "(or '_overwrite_with_gradient', or the state of a converted function) as well, "
        "jax.grad(loss, argnums=(0, 1))(params, sink), and pass that gradient to jfp8.advance. To "
        "update no histories leave 'fp8_sink' out.",
        *(x for x in weights if isinstance(x, jax.Array)),
    )
