"""Warn if a loop differentiates a loss with respect to a weight but not to its sink."""

from __future__ import annotations

from typing import Any

import jax

from jfp8.products.operation import State
from jfp8.tracing.differentiation import warned_if_differentiated
from jfp8.tracing.notes import EXPLAINING

_CONSTANT = (
    "A loss is differentiated with respect to a weight of an FP8 matmul, but not to its sink, so "
    "the amax of its gradient is not recorded. Differentiate with respect to 'fp8_sink' (or "
    "'_overwrite_with_gradient', or the state of a converted function) as well, "
    "jax.grad(loss, argnums=(0, 1))(params, sink), and pass that gradient to jfp8.advance. To "
    "update no histories leave 'fp8_sink' out."
)


def told_if_constant(state: State, weight: Any) -> State:
    """Return `state`; a derivative with respect to the `weight`, but not to its sink, warns."""
    weights = [x for x in (weight, getattr(weight, "carrier", None)) if isinstance(x, jax.Array)]
    if EXPLAINING.value is not None or state.sink is None or not weights:
        return state
    return state._replace(sink=warned_if_differentiated(state.sink, _CONSTANT, *weights))
