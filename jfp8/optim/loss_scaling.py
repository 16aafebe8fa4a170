"""Dynamic loss scaling as optax transformations.

The loss is multiplied by a power of two ``S`` so that small gradients survive narrow formats, and
the gradients are divided by it again.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfp8.optim.finite import all_finite, all_squares_finite, if_finite, scaled
from jfp8.optim.loss_scale_state import (
    LossScaleState,
    Mark,
    loss_scale_in,
    warn_if_misplaced,
    warn_if_not_multiplied,
)
from jfp8.optim.wrapping import transformation, widened
from jfp8.tracing.caller import user_level
from jfp8.tracing.loss import LOSS


class _Rule(NamedTuple):
    """The rule of `loss_scale`, by which S grows and falls."""

    growth_interval: Any
    hysteresis: Any
    growth_factor: Any
    backoff_factor: Any
    min_scale: Any
    max_scale: Any

    @property
    def counts_overflows(self) -> bool:
        """Return whether an overflow may leave S as it is, so that overflows are counted."""
        return not (_is_number(self.hysteresis) and self.hysteresis == 1)

    def after(self, state: LossScaleState, finite: jax.Array) -> dict[str, jax.Array]:
        """Return S and its tracker after a step that was `finite`, bool[]."""
        counts = self.counts_overflows
        tracker, overflows = state.growth_tracker if counts else (state.growth_tracker, 0)
        tracker = jnp.where(finite, tracker + 1, 0)
        overflows = jnp.where(finite, overflows, overflows + 1)
        grow, fall = tracker >= self.growth_interval, ~finite & (overflows >= self.hysteresis)
        grown = jnp.minimum(state.loss_scale * self.growth_factor, self.max_scale)
        fallen = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        scale = jnp.where(grow, grown, jnp.where(fall, fallen, state.loss_scale))
        trackers = jnp.where(grow, 0, jnp.stack([tracker, overflows]) if counts else tracker)
        return {
            "loss_scale": scale.astype(jnp.float32),
            "growth_tracker": trackers.astype(jnp.int32),
        }


def loss_scale(
    inner: optax.GradientTransformation | None = None,
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    on_overflow: Literal["zero", "pass"] = "zero",
) -> optax.GradientTransformationExtraArgs:
    """Remove an adaptive loss scale from gradients; not needed in f32 and bf16. ::

        if all gradients are finite:   updates = grads / S;   tracker += 1
            if tracker == growth_interval:
                S = min(S * growth_factor, max_scale);   tracker = overflows = 0
        else:
            updates = 0;   overflows += 1;   tracker = 0
            if overflows >= hysteresis:   S = max(S * backoff_factor, min_scale)

    It is for f16, and for recipes whose gradients have no scale (``DirectE5M2``,
    ``Hybrid``, ``Unscaled``). Multiply the loss with `scale_loss`; `jfp8.value_and_grad` does so
    itself. Put it first in a chain, and outside ``optax.MultiSteps``. docs/loss_scaling.md shows
    how, which mistakes are noticed, and which compositions skip an overflowing step exactly.

    Gradients are divided in f32 and updates are f32: f16 gradients times 2^-15 would underflow in
    f16, and Adam would turn the zeros into NaN. For the same reason, initialize the optimizer in a
    plain chain with f32 parameters; the wrapping form (with `inner`) initializes `inner` in f32
    itself.

    Args:
      inner: transformation that receives the unscaled gradients and is skipped exactly, including
        its state, when they are not finite.
      init_scale: first S.
      growth_factor, backoff_factor: factors on S after `growth_interval` finite steps, and after a
        step that was not finite.
      growth_interval: finite steps in a row before S grows.
      hysteresis: overflows since S last grew, from which on each lets S fall; the ones before only
        skip their step. Megatron-LM and DeepSpeed use 2.
      min_scale, max_scale: bounds of S.
      on_overflow: without `inner`, ``"zero"`` replaces non-finite updates by zeros and ``"pass"``
        passes them on to a later element that handles them (``optax.apply_if_finite``).

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `LossScaleState`.

    Raises:
      ValueError: scales or factors that are not powers of two (which would make unscaling inexact),
        bounds that exclude `init_scale`, a growth factor below 1 or a backoff factor above it, an
        interval below 1, unknown `on_overflow`, or ``on_overflow="pass"`` with `inner`.

    Warns:
      UserWarning: in ``update``, if no loss was multiplied by the loss scale.

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2;
      ``torch.amp.GradScaler``; ``DynamicGradScaler`` of Megatron-LM for the hysteresis.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = optax.chain(jfp8.loss_scale(), optax.adam(1e-3))
    >>> state = tx.init({"w": jnp.zeros(3)})
    >>> jfp8.scale_loss(2.0, state)
    Array(65536., dtype=float32)
    """
    _check_scales(init_scale, growth_factor, backoff_factor, min_scale, max_scale)
    _check_count("growth_interval", growth_interval)
    _check_count("hysteresis", hysteresis)
    _check_options(inner, on_overflow)
    wrapped = None if inner is None else transformation("loss_scale", inner)
    always_1 = all(_is_number(bound) and bound == 1 for bound in (min_scale, max_scale))
    factors = growth_factor, backoff_factor, min_scale, max_scale
    rule = _Rule(growth_interval, hysteresis, *factors)
    falls = _is_number(min_scale) and _is_number(init_scale) and min_scale < init_scale
    mark = Mark(multiplied=always_1, least=float(min_scale) if falls else None)

    def init_fn(params: optax.Params) -> LossScaleState:
        return LossScaleState(
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            growth_tracker=jnp.zeros((2,) if rule.counts_overflows else (), jnp.int32),
            grads_finite=jnp.ones((), bool),
            overflow_count=jnp.zeros((), jnp.int32),
            inner_state=() if wrapped is None else wrapped.init(widened(params)),
        ).marked(mark)

    def update_fn(
        updates: optax.Updates,
        state: LossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaleState]:
        warn_if_not_multiplied(state)
        finite = all_finite(updates)
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale, updates)
        new_inner: Any = ()
        if wrapped is not None:
            finite &= all_squares_finite(updates)
            updates, new_inner = wrapped.update(updates, state.inner_state, params, **extra_args)
            new_inner = if_finite(finite, new_inner, state.inner_state)
        if on_overflow == "zero":
            updates = if_finite(finite, updates, optax.tree.zeros_like(updates))
        return updates, state._replace(
            **rule.after(state, finite),
            grads_finite=finite,
            overflow_count=state.overflow_count + jnp.where(finite, 0, 1).astype(jnp.int32),
            inner_state=new_inner,
        )

    return optax.GradientTransformationExtraArgs(init_fn, cast(Any, update_fn))


# optax.inject_hyperparams calls `loss_scale` with arrays, which may be traced: not checked.


def _uncalled(*arguments: Any, **options: Any) -> Any:
    raise TypeError("The optimizer contains the function loss_scale. Call it: jfp8.loss_scale().")


# Without its parentheses in ``optax.chain``, the function is taken for a transformation.
vars(loss_scale).update(init=_uncalled, update=_uncalled)


def _check_scales(
    init_scale: Any, growth_factor: Any, backoff_factor: Any, min_scale: Any, max_scale: Any
) -> None:
    for name, value in locals().items():
        power = _is_number(value) and 0 < value < math.inf and math.frexp(value)[0] == 0.5
        if not power and not isinstance(value, jax.Array):
            raise ValueError(
                f"loss_scale({name}={value!r}): must be a power of two, so that scaling is exact; "
                "for example 2.0**15."
            )
    for low_name, low, high_name, high in (
        # Within these 1 / S is normal in f32; XLA may multiply by it, and flushes subnormals to 0.
        ("2**-126", 2.0**-126, "min_scale", min_scale),
        ("max_scale", max_scale, "2**126", 2.0**126),
        ("min_scale", min_scale, "init_scale", init_scale),
        ("init_scale", init_scale, "max_scale", max_scale),
        ("1", 1, "growth_factor", growth_factor),
        ("backoff_factor", backoff_factor, "1", 1),
    ):
        if _is_number(low) and _is_number(high) and low > high:
            raise ValueError(
                f"loss_scale: {low_name} must not exceed {high_name}, but {low_name} = {low} and "
                f"{high_name} = {high}."
            )


def _check_count(name: str, n: Any) -> None:
    whole = isinstance(n, int | np.integer) and not isinstance(n, bool)
    if not isinstance(n, jax.Array) and not (whole and n >= 1):
        raise ValueError(f"loss_scale({name}={n!r}): must be an int of at least 1.")


def _check_options(inner: Any, on_overflow: str) -> None:
    if on_overflow not in ("zero", "pass"):
        raise ValueError(f"on_overflow={on_overflow!r} is unknown. Allowed: 'zero', 'pass'.")
    if inner is not None and on_overflow == "pass":
        raise ValueError(
            "on_overflow='pass' passes non-finite updates to the next element of a chain; with "
            "inner= the step is skipped instead. Drop one of the two."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def skip_on_overflow(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip a step with non-finite gradients exactly: zero updates, and `tx` keeps its state.

    A gradient beyond 2^62, whose square is Inf in f32, counts as non-finite. Only a
    `LossScaleState` inside `tx` is updated, so that the scale falls.

    Args:
      tx: the transformation, for example
        ``optax.chain(jfp8.loss_scale(), optax.clip_by_global_norm(1.0), optax.adamw(1e-3))``.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with the state of `tx`.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), optax.adam(1e-3)))
    >>> params = {"w": jnp.zeros(2)}
    >>> state = tx.init(params)
    >>> grads = {"w": jfp8.scale_loss(1.0, state) * jnp.array([1.0, jnp.inf])}
    >>> updates, state = tx.update(grads, state, params)
    >>> updates["w"], optax.tree.get(state, "count")
    (Array([0., 0.], dtype=float32), Array(0, dtype=int32))
    """
    inner = transformation("skip_on_overflow", tx)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        finite = all_squares_finite(updates)
        updates, new_state = inner.update(updates, state, params, **extra_args)
        return if_finite(finite, (updates, new_state), (optax.tree.zeros_like(updates), state))

    return optax.GradientTransformationExtraArgs(inner.init, cast(Any, update_fn))


def scale_loss(loss: jax.typing.ArrayLike, opt_state: optax.OptState) -> jax.Array:
    """Return ``loss * S`` in f32, with the S of the `loss_scale` inside `opt_state`.

    Args:
      loss: scalar.
      opt_state: state of a transformation that contains exactly one `loss_scale`.

    Returns:
      f32[]. (A product in f16 would overflow.)

    Raises:
      ValueError: there is no `loss_scale` in it, more than one, or one that covers only a group of
        an ``optax.multi_transform`` while others are trained.

    Warns:
      UserWarning: if a transformation in front of it may depend on the size of gradients, or if
        `value_and_grad` multiplies the loss by S itself.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> tx = jfp8.loss_scale(optax.sgd(0.1), init_scale=8.0)
    >>> jfp8.scale_loss(0.5, tx.init({"w": jnp.zeros(2)}))
    Array(4., dtype=float32)
    """
    warn_if_misplaced(opt_state)
    factor = loss_scale_in(opt_state)
    if factor is None:
        raise ValueError(
            "opt_state holds no loss scale. Make the optimizer with one: "
            "optax.chain(jfp8.loss_scale(), optax.adam(1e-3))."
        )
    if LOSS.value is not None and LOSS.value.is_scaled:
        warnings.warn(_SCALED_TWICE, UserWarning, stacklevel=user_level())
    return scaled(jnp.asarray(loss), factor)


_SCALED_TWICE = (
    "scale_loss() is called in a loss function that value_and_grad multiplies by the loss scale S "
    "itself (in NNX by loss_scale=...): gradients would be S times too large, 32768 at first. "
    "Return the loss as it is. Ignore this if the result is only printed or logged."
)
