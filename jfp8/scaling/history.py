"""The amax history of one tensor: its amaxes in earlier steps, from which delayed scales follow.

All functions take stacked states, too (leading axes from ``nn.scan`` or ``vmap``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

AmaxState: TypeAlias = dict[str, jax.Array]
"""One operand's state: ``{"amax_history": f32[H], newest first, 0 = empty slot,
"amax": f32[], running maximum of the optimizer step under way}``."""


def as_dicts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, whatever mappings (Flax's FrozenDict, say) `tree` is made of."""
    return {k: as_dicts(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def init_amax_state(history_len: int) -> AmaxState:
    """An empty history, and no amax seen in this step.

    Args:
      history_len: steps that it remembers.

    Returns:
      An `AmaxState` of zeros.
    """
    return {
        "amax_history": jnp.zeros((history_len,), jnp.float32),
        "amax": jnp.zeros((), jnp.float32),
    }


def history_amax(history: jax.Array, algo: str) -> jax.Array:
    """The amax that a history predicts; 0 if it is empty.

    Args:
      history: ``f32[..., H]``, newest first.
      algo: ``"max"`` of it, or its ``"most_recent"`` entry.

    Returns:
      ``f32[...]``.
    """
    return jnp.max(history, axis=-1) if algo == "max" else history[..., 0]


def push_amax(history: jax.Array, amax: jax.Array) -> jax.Array:
    """`history` (newest first) with `amax` in front and the oldest entry dropped.

    Zero and non-finite values do not enter: they predict nothing, and one Inf would freeze the
    scale for as long as it stayed in the window.

    Args:
      history: ``f32[..., H]``, newest first.
      amax: ``f32[...]``.

    Returns:
      An array like `history`.
    """
    amax = amax[..., None].astype(history.dtype)
    pushed = jnp.concatenate([amax, history[..., :-1]], axis=-1)
    return jnp.where((amax > 0) & jnp.isfinite(amax), pushed, history)


def observe(state: AmaxState, amax: jax.Array) -> AmaxState:
    """`state` with `amax` folded into the maximum of the step under way (non-finite: ignored)."""
    seen = jnp.where(jnp.isfinite(amax), amax, 0.0)
    return {**state, "amax": jnp.maximum(state["amax"], seen)}


def end_step(state: AmaxState) -> AmaxState:
    """Close the step under way: its maximum becomes the newest entry of the history."""
    return {
        "amax_history": push_amax(state["amax_history"], state["amax"]),
        "amax": jnp.zeros_like(state["amax"]),
    }
