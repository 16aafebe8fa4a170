"""Parameters in 16 bits without f32 copies: their updates are rounded stochastically.

Rounded to nearest, an update of less than half an ulp of its parameter is lost, every time, and
training stalls. Rounded up with the probability of the remainder, it is unbiased.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import optax

from jfp8.optim.masters import Rounded
from jfp8.optim.wrapping import MasterWeightsState, transformation
from jfp8.scaling import printing
from jfp8.scaling.trees import is_scaled_array


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      count: u32[], number of updates; with the seed it determines the random bits.
      inner_state: state of the wrapped transformation.
    """

    count: jax.Array
    inner_state: Any

    def __repr__(self) -> str:
        """Print the contents, by type and size."""
        return printing.named_state(self)


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Update bf16 and f16 parameters by ``p <- round_stochastically(p + u)``, others plainly.

    The 16-bit parameters are their own master weights. `inner` sees them, and keeps its state, in
    f32. The updates come out in f32, as ``round(p + u) - p``, so that ``optax.apply_updates`` gives
    exactly the rounded value (unless a step shrinks a parameter more than 2^14-fold). Nothing may
    change the updates after this: put it last in a chain, or directly inside of
    `jfp8.loss_scale` or `jfp8.skip_on_overflow`.

    Args:
      inner: the optimizer, such as ``optax.adamw(1e-3)``.
      seed: seed of the random bits, which also depend on the step, the leaf and the element.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StochasticRoundingState`.

    Raises:
      TypeError: `inner` is not a transformation, or `seed` not an int.
      ValueError: ``update`` is called without ``params``.

    References:
      Intel FP8 Emulation Toolkit ("stochastic 16-bit master weights"); torchao,
      ``bf16_stochastic_round``.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.loss_scale(jfp8.optim.stochastic_rounding(optax.adam(1e-3)))
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> grads = {"w": jfp8.scale_loss(1.0, state) * jnp.ones(3)}
    >>> updates, state = tx.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    wrapped = transformation("stochastic_rounding", inner)
    tx = Rounded("stochastic_rounding", wrapped, None, seed)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        state = tx.init(params)
        return StochasticRoundingState(state.count, state.inner_state)

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        none = jax.tree.map(lambda p: optax.MaskedNode(), params, is_leaf=is_scaled_array)
        full = MasterWeightsState(state.count, none, state.inner_state)
        updates, full = tx.update(updates, full, params, **extra_args)
        return updates, StochasticRoundingState(full.count, full.inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, cast(Any, update_fn))
