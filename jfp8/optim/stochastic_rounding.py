"""Parameters in 16 bits without f32 copies: their updates are rounded stochastically.

Rounded to nearest, an update of less than half an ulp of its parameter is lost, every time, and
training stands still. Rounded up with the probability of the remainder, it is right on average.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jfp8.optim.loss_scaling import transformation, widened
from jfp8.scaling import printing
from jfp8.scaling.random_bits import fold_in, hash_bits


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      count: u32[], number of updates; with the seed it determines the random bits.
      inner_state: state of the wrapped transformation.
    """

    count: jax.Array
    inner_state: Any

    def __repr__(self) -> str:
        """What is in it, by type and size."""
        return printing.named_state(self)


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """``p <- round_stochastically(p + u)`` for bf16 and f16 parameters ``p``; others as they are.

    The 16-bit parameters are their own master weights. `inner` sees them, and keeps its state, in
    f32. The updates come out in f32, as ``round(p + u) - p``, so that ``optax.apply_updates`` gives
    exactly the rounded value (unless a step shrinks a parameter more than 2^14-fold). Nothing may
    change the updates after this: put it last in a chain, or directly inside of
    `jfp8.loss_scale` or `jfp8.skip_on_overflow`.

    Args:
      inner: the optimizer, such as ``optax.adamw(1e-3)``.
      seed: of the random bits, which also depend on the step, the leaf and the element.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StochasticRoundingState`.

    Raises:
      TypeError: `inner` is no transformation, or `seed` no int.
      ValueError: ``update`` is called without ``params``.

    References:
      Intel FP8 Emulation Toolkit ("stochastic 16-bit master weights"); torchao,
      ``bf16_stochastic_round``.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.loss_scale(jfp8.optim.stochastic_rounding(optax.adam(1e-3)))
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> updates, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"stochastic_rounding(seed={seed!r}): must be an int.")
    wrapped = transformation("stochastic_rounding", inner)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        return StochasticRoundingState(jnp.zeros((), jnp.uint32), wrapped.init(widened(params)))

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        if params is None:
            raise ValueError(
                "stochastic_rounding needs the parameters it rounds: call "
                "tx.update(grads, state, params)."
            )
        wide = widened(params)
        updates, inner_state = wrapped.update(
            widened(updates), state.inner_state, wide, **extra_args
        )
        step_seed = fold_in(
            jnp.asarray([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], jnp.uint32), state.count
        )
        leaves, structure = jax.tree.flatten(params)
        of_leaves = structure.flatten_up_to(updates)
        rounded = [
            _update(p, u, fold_in(step_seed, np.uint32(i)))
            for i, (p, u) in enumerate(zip(leaves, of_leaves, strict=True))
        ]
        new_state = StochasticRoundingState(state.count + np.uint32(1), inner_state)
        return structure.unflatten(rounded), new_state

    return optax.GradientTransformationExtraArgs(init_fn, cast(Any, update_fn))


def _update(p: jax.Array, u: Any, seed: jax.Array) -> Any:
    """The f32 update that takes `p` to ``round(p + u)``."""
    if not hasattr(u, "dtype"):  # a placeholder of optax.masked
        return u
    dtype = jnp.result_type(p)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return u
    wide = p.astype(jnp.float32)
    new = round_to_16_bits(wide + u.astype(jnp.float32), dtype, hash_bits(seed, p.shape))
    return new - wide


def round_to_16_bits(x: jax.Array, dtype: np.dtype, bits: jax.Array) -> jax.Array:
    """`x`, f32, rounded stochastically to the values of bf16 or f16, saturating; stays f32.

    ``P(up) = remainder / ulp``, subnormals of f16 included. Inf and NaN stay as they are.
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = pattern & np.uint32(0x80000000), pattern & np.uint32(0x7FFFFFFF)
    drop = np.uint32(16 if dtype == jnp.bfloat16 else 13)
    mask = np.uint32((1 << drop) - 1)
    largest = np.float32(jnp.finfo(dtype).max).view(np.uint32)
    rounded = jnp.minimum((magnitude + (bits & mask)) & ~mask, largest)
    y = lax.bitcast_convert_type(sign | rounded, jnp.float32)
    if dtype == jnp.float16:  # below 2^-14 its step is fixed, at 2^-24
        smallest_normal = np.float32(2.0**-14)
        fixed = jnp.minimum(jnp.abs(x), smallest_normal) * np.float32(2.0 ** (24 + 13))
        steps = (fixed.astype(jnp.int32).astype(jnp.uint32) + (bits & mask)) >> drop
        subnormal = steps.astype(jnp.float32) * np.float32(2.0**-24)
        y = jnp.where(jnp.abs(x) < smallest_normal, jnp.copysign(subnormal, x), y)
    return jnp.where(jnp.isfinite(x), y, x)
