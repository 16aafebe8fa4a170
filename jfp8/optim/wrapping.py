"""Helpers of transformations that wrap another one: checks, inputs in f32, seeds, states."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfp8.scaling import printing
from jfp8.scaling.trees import is_scaled_array

State = TypeVar("State")


def transformation(function: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with extra arguments; optax.MultiSteps is one by its methods alone."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{function} wraps an optax transformation such as optax.adam(1e-3), got {tx!r}. "
            "Settings are passed by name: loss_scale(init_scale=2.0**15)."
        )
    return optax.with_extra_args_support(tx)


def widened(params: Any) -> Any:
    """Cast 16-bit arrays to f32, so that moments start in f32. All else is kept.

    Optax also passes placeholders, and parameters may be in FP8.
    """

    def widen(leaf: Any) -> Any:
        narrow = isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype.itemsize < 4
        floating = narrow and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(jnp.float32) if floating else leaf

    return jax.tree.map(widen, params, is_leaf=is_scaled_array)


def states_of(kind: type[State], opt_state: Any) -> list[State]:
    """List the states of type `kind` in `opt_state`; of nested ones the outermost."""
    is_kind = lambda node: isinstance(node, kind)
    return [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(leaf)]


class AnyScaleState(optax.EmptyState):
    """State of a stateless element that does the same at every loss scale: it may be in front."""

    __slots__ = ()


def seed_words(seed: jax.typing.ArrayLike) -> jax.Array:
    """Return the seed as uint32[2]. (optax.inject_hyperparams makes an array of it.)"""
    if isinstance(seed, int):
        return jnp.asarray([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], jnp.uint32)
    return jnp.stack([jnp.asarray(seed).astype(jnp.uint32), jnp.zeros((), jnp.uint32)])


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      count: u32[], number of updates; with the seed it determines the random bits.
      masters: for every parameter, its stored master; ``optax.MaskedNode()`` where the parameter is
        its own master.
      inner_state: state of the wrapped transformation.
    """

    count: jax.Array
    masters: Any
    inner_state: Any

    __repr__ = printing.named_state


def has_master_weights(opt_state: optax.OptState) -> bool:
    """Return whether `opt_state` belongs to an optimizer that trains FP8 parameters."""
    return bool(states_of(MasterWeightsState, opt_state))
