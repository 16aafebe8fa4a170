"""A test for finite gradients, and the one way to skip a step: `if_finite`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.optim.loss_scale_state import LossScaleState


def scaled(tree: Any, loss_scale: jax.typing.ArrayLike | None) -> Any:
    """Multiply `tree` by the loss scale, in f32; return it unchanged if there is none."""
    if loss_scale is None:
        return tree
    return jax.tree.map(lambda x: x.astype(jnp.float32) * loss_scale, tree)


def unscaled(tree: Any, loss_scale: jax.typing.ArrayLike | None) -> Any:
    """Divide `tree` by the loss scale, in f32; exact, because it is a power of two."""
    return tree if loss_scale is None else scaled(tree, 1.0 / loss_scale)


def all_finite(tree: Any) -> jax.Array:
    """Return True if no floating leaf of `tree` holds an Inf or NaN, bool[]."""
    return _holds(jnp.isfinite, tree)


# Its square, which optimizers average, and sums of a few such squares are finite in f32.
LARGEST_GRADIENT = np.float32(2.0**62)


def all_squares_finite(tree: Any) -> jax.Array:
    """Return True if all is finite and no magnitude is beyond 2^62, bool[].

    The square of a larger gradient is Inf, and stays in a second moment forever.
    """
    return _holds(lambda x: jnp.abs(x).astype(jnp.float32) <= LARGEST_GRADIENT, tree)


def _holds(condition: Callable[[jax.Array], jax.Array], tree: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return all_of([jnp.all(condition(leaf)) for leaf in leaves])


def all_of(flags: Sequence[jax.Array]) -> jax.Array:
    """Reduce `flags`, bool[] each, by logical and.

    Behind the barrier the reduction stays one. Without it XLA makes a chain of ``and`` of it, and
    repeats that in every kernel that reads its end.
    """
    return jnp.all(lax.optimization_barrier(jnp.stack(flags))) if flags else jnp.ones((), bool)


def nan_unless(finite: jax.Array, grads: Any) -> Any:
    """Return `grads` if `finite`, else NaN: any loss scale that gets them sees an overflow."""
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)


def if_finite(finite: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` if `finite`, bool[], else `old` with only numbers of a loss scale updated."""
    is_loss_scale = lambda node: isinstance(node, LossScaleState)

    def select(new_node: Any, old_node: Any) -> Any:
        if not is_loss_scale(new_node):
            return jnp.where(finite, new_node, old_node)
        inner_state = if_finite(finite, new_node.inner_state, old_node.inner_state)
        return new_node._replace(inner_state=inner_state)

    return jax.tree.map(select, new, old, is_leaf=is_loss_scale)
