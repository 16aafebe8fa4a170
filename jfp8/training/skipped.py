"""Steps that train nothing, which states count: warn where a state is read, name the reason."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.optim.finite import all_squares_finite
from jfp8.optim.loss_scale_state import LossScaleState
from jfp8.optim.wrapping import states_of
from jfp8.scaling.sink import decode_amax
from jfp8.tracing.caller import user_level

COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")
"""The counters of `TrainState`."""

_MANY = 10
_SKIPPED = (
    f"At least the last {_MANY} steps were skipped, because the loss, a gradient or an operand of "
    "an FP8 matmul was NaN or Inf, or a gradient beyond 2^62: parameters do not change. "
    "grads.not_finite() lists paths, for grads of jfp8.value_and_grad; in a tree of NNX "
    "jax.tree.map(jnp.isfinite, grads)."
)
_LEAST = (
    "The loss scale has fallen to its least value, {:g}: it cannot help any more if gradients "
    "overflow. Usually a tensor is NaN or Inf at any scale: grads.not_finite() lists paths, for "
    "grads of jfp8.value_and_grad. To let it fall further, pass loss_scale(min_scale=...)."
)


def tell(in_a_row: Any, opt_state: Any, *, at_once: bool = False) -> None:
    """Warn if the last steps were skipped, or if a loss scale is at its least value.

    Under ``jit`` nothing is known of that yet. With `at_once` the compiled program then calls back
    from a branch that it does not enter otherwise.

    Args:
      in_a_row: i32[], the number of the last steps that were skipped.
      opt_state: the state of the optimizer.
      at_once: whether traced numbers are told, too.
    """
    numbers = [(_SKIPPED, in_a_row, lambda n: n >= _MANY)]
    for scale in states_of(LossScaleState, opt_state):
        if (least := scale.mark.least) is not None:
            numbers.append((_LEAST.format(least), scale.loss_scale, partial(operator.ge, least)))
    for message, number, is_bad in numbers:
        if not isinstance(number, jax.core.Tracer):
            _warn_if(message, is_bad, number)
        elif at_once:
            call = partial(jax.debug.callback, partial(_warn_if, message, is_bad))
            jax.lax.cond(jnp.any(is_bad(number)), call, lambda number: None, number)


def _warn_if(message: str, is_bad: Callable[[Any], Any], number: Any) -> None:
    """Warn if `number` is known, and bad; states also hold shapes and placeholders."""
    if getattr(number, "is_fully_replicated", isinstance(number, np.ndarray)):
        if np.any(is_bad(np.asarray(number))):  # in NumPy, since JAX may be tracing
            warnings.warn(message, stacklevel=user_level())


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
