"""`TrainState`: parameters, amax histories and optimizer state of a training run, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfp8.layers.linen.state_in_gradients import OVERWRITTEN
from jfp8.optim.finite import all_squares_finite, if_finite, nan_unless, scaled, unscaled
from jfp8.optim.fp8_params import apply_updates, without_stored
from jfp8.optim.loss_scale_state import (
    find_loss_scale,
    loss_scale_in,
    warn_if_misplaced,
    warn_if_not_multiplied,
)
from jfp8.optim.wrapping import has_master_weights, states_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import as_dicts
from jfp8.training.carried import Carried
from jfp8.training.end_of_step import decode_all, end_step, growth_of
from jfp8.training.model_histories import Collections, init_sinks
from jfp8.training.other_model import histories_for, note_other_optimizer
from jfp8.training.printed import printed_gradients, printed_state
from jfp8.training.skipped import paths_not_finite, tell


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """Gradients, amaxes and collections: `value_and_grad` returns, `apply_gradients` takes them.

    Arithmetic on the tree is arithmetic on `params`: it may be scaled, clipped by its norm, added
    up, or averaged over devices (``jax.lax.pmean``). The amaxes stay right, and the collections are
    those of the step, or their mean.

    Attributes:
      params: gradient of the unscaled loss with respect to the parameters (f32 if there is a loss
        scale). For FP8 parameters it is f32, or ``optax.MaskedNode()`` if they are frozen.
      fp8_sink: gradient with respect to the ``fp8_sink`` collection: amaxes, under the scaled loss.
      collections: new values of the other collections, such as ``batch_stats``: a mapping, which
        `Carried` holds.
      loss: f32[], the loss times 2^-64, too small for a norm: Inf or NaN if the loss is.
    """

    params: Any
    fp8_sink: Collections
    collections: Mapping[str, Any]
    loss: jax.typing.ArrayLike = 0.0

    def __post_init__(self) -> None:
        given = self.collections
        if isinstance(given, Mapping) and given and not isinstance(given, Carried):
            object.__setattr__(self, "collections", Carried.of(given))

    def __repr__(self) -> str:
        """Print the contents, by size."""
        return printed_gradients(self)

    def not_finite(self) -> list[str]:
        """List the gradients and matmuls that make `apply_gradients` skip, outside ``jit``.

        Returns:
          Paths of gradients with a NaN, an Inf or a value beyond 2^62, such as
          ``"params/Dense_0/bias"``; then of matmuls with an operand that has one, such as
          ``"fp8_sink/Dense_0/DotGeneral_0"``; and ``"loss"``.
        """
        return paths_not_finite(self.params, self.fp8_sink, self.loss)


class TrainState(flax.struct.PyTreeNode):
    """Parameters, amax histories and optimizer state, advanced together or not at all.

    Parameters that are stored in FP8 (`ScaledArray`) are trained if the optimizer contains
    `jfp8.optim.master_weights`. Otherwise they are frozen, and `tx` does not see them.

    Attributes:
      step: i32[], number of calls of `apply_gradients`, skipped ones included.
      skipped_steps: i32[], number of those that were skipped.
      skipped_in_a_row: i32[], number of the last ones that were.
      params: the ``params`` collection.
      fp8: the ``fp8`` collection; ``{}`` for recipes without state.
      opt_state: state of `tx`.
      collections: all other collections, such as ``batch_stats``.
      apply_fn: ``model.apply``, kept for convenience.
      tx: the optimizer.
    """

    step: jax.Array
    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array
    params: Any
    fp8: Collections
    opt_state: optax.OptState
    collections: Collections
    apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)

    def __repr__(self) -> str:
        """Print the step, and the contents by size."""
        return printed_state(self)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        variables: Mapping[str, Any] | None = None,
        tx: optax.GradientTransformation,
        **unknown: Any,
    ) -> TrainState:
        """Return the state before the first step.

        Args:
          apply_fn: ``model.apply``.
          variables: the result of ``model.init``.
          tx: optimizer; it sees nothing but ``params``, and of those only what is trained.
          unknown: refused, with the call to write.

        Raises:
          TypeError: another argument, such as Flax's ``params``; an NNX model; no optimizer.
          ValueError: no ``params``; ``_overwrite_with_gradient``; sinks of another model.
        """
        collections = _collections(variables, unknown)
        params, fp8 = collections.pop("params"), collections.pop("fp8", {})
        sinks = collections.pop("fp8_sink", None)
        shapes = jax.tree.map(jnp.shape, jax.eval_shape(init_sinks, fp8))
        if sinks is not None and jax.tree.map(jnp.shape, sinks) != shapes:
            raise ValueError(
                "The 'fp8_sink' collection does not belong to the 'fp8' collection. Lift both "
                "alike, stacked along axis 0: nn.scan(..., variable_axes={'params': 0, 'fp8': 0, "
                "'fp8_sink': 0})."
            )
        if not hasattr(tx, "init"):
            raise TypeError(f"tx must be an optimizer, such as optax.adam(1e-3), got {tx!r:.40}.")
        opt_state = tx.init(without_stored(params) if states_of(ScaledArray, params) else params)
        if has_master_weights(opt_state):
            opt_state = tx.init(params)
        warn_if_misplaced(opt_state)
        return cls(
            step=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
            params=params,
            fp8=fp8,
            opt_state=opt_state,
            collections=collections,
            apply_fn=apply_fn,
            tx=tx,
        )

    def with_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> TrainState:
        """Go on with `model`: the way to another recipe in mid-run.

        Parameters, optimizer state, step and other collections stay. A product that has amax
        histories under both recipes goes on with theirs, which are of the same tensors; others
        start empty, with current scaling until they fill. A compiled step is traced again.

        Args:
          model: a model with the same parameters, such as ``jfp8.convert(base, recipe)``.
          args, kwargs: see ``model.init``, arrays or their shapes.

        Raises:
          ValueError: `model` has other parameters or collections.

        >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8, optax
        >>> base, x = nn.Sequential([nn.Dense(8), nn.Dense(4)]), jnp.ones((2, 3))
        >>> def model_of(step):  # high precision, then FP8
        ...     return jfp8.convert(base, {"*": None} if step < 100 else "delayed", exempt=())
        >>> state = jfp8.TrainState.create(
        ...     apply_fn=base.apply, variables=base.init(jax.random.key(0), x), tx=optax.sgd(0.1)
        ... )
        >>> sorted(state.with_model(model_of(100), x).fp8)
        ['layers_0', 'layers_1']
        """
        fp8 = histories_for(model, args, kwargs, self)
        return self.replace(apply_fn=model.apply, fp8=fp8)

    @property
    def variables(self) -> Collections:
        """Return the collections for ``apply``: histories are read, nothing is recorded.

        Warns:
          UserWarning: the last 10 steps were skipped, or the loss scale is at its least value.
        """
        tell(self.skipped_in_a_row, self.opt_state)
        fp8 = {"fp8": self.fp8} if self.fp8 else {}
        return {"params": self.params, **fp8, **self.collections}

    def __contains__(self, name: object) -> bool:
        raise TypeError("A TrainState holds no collections. Call model.apply(state.variables, x).")

    @property
    def has_stored_params(self) -> bool:
        """Return True if some parameters are stored as a `ScaledArray`."""
        return bool(states_of(ScaledArray, self.params))

    def apply_gradients(self, grads: Gradients, **extra_args: Any) -> TrainState:
        """Return the state after one optimizer step.

        The step is skipped if the loss, a gradient or an operand of an FP8 matmul contains an Inf
        or NaN, or if a gradient is beyond 2^62, so that optimizers could not square it. Then
        parameters, optimizer state, histories and other collections stay as they are, bit for bit;
        only the counters count on and the loss scale falls. When the loss scale changes, the
        histories of gradients are rescaled. While ``optax.MultiSteps`` accumulates, the histories
        wait for its last micro-step and get the largest amax of all.

        Args:
          grads: the result of `value_and_grad`, averaged over devices or not. Without histories
            (``fp8`` is ``{}``) also plain gradients with respect to ``params``, of the loss times
            its loss scale if there is one.
          extra_args: passed on to `tx`, such as ``value=loss`` for ``optax.polyak_sgd``.

        Raises:
          TypeError: `grads` is not a `Gradients` although there are histories to update.

        Warns:
          UserWarning: `grads` is not a `Gradients`, and nothing has multiplied the loss by the loss
            scale of the optimizer. Outside ``jit``, as in `variables`.
        """
        grads = self._with_amaxes(grads)
        amaxes, overflow = decode_all(grads.fp8_sink)
        finite = all_squares_finite(grads.params) & jnp.all(jnp.isfinite(grads.loss)) & ~overflow
        trained, apply = self.params, optax.apply_updates
        if states_of(ScaledArray, self.params):
            apply = apply_updates
            trained = trained if has_master_weights(self.opt_state) else without_stored(trained)
        tx = optax.with_extra_args_support(self.tx)
        taken, scale = grads.params, loss_scale_in(self.opt_state)
        if scale is not None:  # `tx` takes gradients of the scaled loss.
            taken = nan_unless(finite, scaled(taken, scale))
        try:
            updates, opt_state = tx.update(taken, self.opt_state, trained, **extra_args)
        except Exception as error:
            note_other_optimizer(error, tx, self.opt_state, trained)
            raise
        new = apply(self.params, updates), opt_state
        params, opt_state = if_finite(finite, new, (self.params, self.opt_state))
        collections, carried = self.collections, grads.collections
        if isinstance(carried, Carried):
            kept = {name: collections[name] for name in carried}
            new = if_finite(finite & ~carried.is_lost(), dict(carried), kept)
            collections = {**collections, **new}
        ends, growth = _steps_end(self.opt_state, opt_state), growth_of(self.opt_state, opt_state)
        in_a_row = jnp.where(finite, 0, self.skipped_in_a_row + 1)
        tell(in_a_row, opt_state)
        return self.replace(
            step=self.step + 1,
            skipped_steps=self.skipped_steps + jnp.where(finite, 0, 1),
            skipped_in_a_row=in_a_row,
            params=params,
            fp8=end_step(self.fp8, amaxes, finite, ends=ends, growth=growth),
            opt_state=opt_state,
            collections=collections,
        )

    def _with_amaxes(self, grads: Any) -> Gradients:
        """Return `grads` with the amaxes that belong to them, or raise if there are none."""
        if isinstance(grads, Gradients):
            return grads
        if self.fp8:
            raise TypeError(
                "apply_gradients needs the amaxes that belong to the gradients, to update the "
                f"fp8 histories, but got {type(grads).__name__}. Compute the gradients with "
                "loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)."
            )
        if (found := find_loss_scale(self.opt_state)) is not None:
            warn_if_not_multiplied(found)
        return Gradients(unscaled(grads, loss_scale_in(self.opt_state)), {}, {})


def _collections(variables: Any, unknown: Mapping[str, Any]) -> Collections:
    """Return what `TrainState.create` takes as `variables`, or raise: see there."""
    parts = variables if isinstance(variables, tuple) else (variables,)  # nnx.split's
    for part in (*unknown.values(), *parts):
        if isinstance(part, nnx.Module | nnx.State | nnx.GraphDef):
            raise TypeError(
                f"TrainState.create takes variables of Linen. It got an NNX {type(part).__name__}, "
                "which holds its own state: jfp8.nnx.Optimizer(model, tx, wrt=nnx.Param), with "
                "gradients from jfp8.nnx.value_and_grad(f)(model, x)."
            )
    if unknown or variables is None:
        given, hint = ", ".join(sorted(unknown)) or "no variables", ""
        if "loss_scale" in unknown:
            hint = " A loss scale is part of tx: optax.chain(jfp8.loss_scale(), tx)."
        raise TypeError(
            f"TrainState.create takes apply_fn, variables and tx, but got {given}.{hint} Pass "
            "all that model.init returned, because amax histories stand beside the parameters: "
            "jfp8.TrainState.create(apply_fn=model.apply, variables=model.init(key, x), tx=tx)."
        )
    collections = as_dicts(variables)
    if "params" not in collections:
        raise ValueError(
            f"variables has the collections {sorted(collections)}, but no 'params'. Pass all "
            "that model.init(...) returned, not variables['params']."
        )
    if collections.get(OVERWRITTEN):
        raise ValueError(
            f"variables has state in {OVERWRITTEN!r}, which jfp8.TrainState does not replace "
            "by its gradient. Make the model with state_collection='fp8', or use "
            "flax.training.train_state.TrainState.create(params=variables, ...)."
        )
    return collections


def _steps_end(before: optax.OptState, after: optax.OptState) -> jax.Array | None:
    """Return bool[], True if ``optax.MultiSteps`` ends a step; None if nothing accumulates."""
    states = states_of(optax.MultiStepsState, before), states_of(optax.MultiStepsState, after)
    counted = [old.gradient_step != new.gradient_step for old, new in zip(*states, strict=True)]
    return jnp.any(jnp.stack(counted), axis=0) if counted else None
