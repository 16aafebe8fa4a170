"""Skipped steps, which states count: warn where a state is read, and name the reason."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.optim.finite import all_squares_finite
from jfp8.scaling.sink import decode_amax
from jfp8.tracing.caller import user_level

COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")
"""The counters of `TrainState`."""

_MANY = 10


def warn_of_skipped(count: Any) -> None:
    """Warn if the last `_MANY` steps were skipped; `count` is i32[], a tracer under ``jit``."""
    if isinstance(count, jax.core.Tracer) or not isinstance(count, jax.Array):
        return
    if count.is_fully_replicated and count.ndim == 0 and int(count) >= _MANY:
        warnings.warn(
            f"The last {int(count)} steps were skipped, because the loss, a gradient or an operand "
            "of an FP8 matmul was NaN or Inf, or a gradient beyond 2^62: parameters do not change. "
            "grads.not_finite() lists paths, for grads of jfp8.value_and_grad; in a tree of NNX "
            "jax.tree.map(jnp.isfinite, grads).",
            stacklevel=user_level(),
        )


def paths_not_finite(params: Any, sinks: Any, loss: Any) -> list[str]:
    """List the paths of gradients that are not finite, and of matmuls with such operands."""
    found = []
    for path, leaf in jax.tree.leaves_with_path({"params": params}):
        if not all_squares_finite([leaf]):
            found.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    for path, sink in jax.tree.leaves_with_path({"fp8_sink": sinks}):
        if decode_amax(sink)[1].any():
            found.append(jax.tree_util.keystr(path[:-1], simple=True, separator="/"))
    return found if jnp.isfinite(loss).all() else [*found, "loss"]
