"""`Optimizer`: Flax's optimizer, except that it skips a step that is not finite."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfp8.layers.nnx.signatures import SignatureOfClass
from jfp8.optim.finite import all_squares_finite, if_finite, nan_unless, unscaled
from jfp8.optim.fp8_params import apply_updates
from jfp8.optim.loss_scale_state import find_loss_scale
from jfp8.training.metrics import metrics_of
from jfp8.training.model_histories import merged
from jfp8.training.nnx_step import training_products
from jfp8.training.other_model import note_other_optimizer
from jfp8.training.skipped import tell

M = TypeVar("M", bound=nnx.Module)


class Optimizer(nnx.Optimizer[M], Generic[M]):
    """`flax.nnx.Optimizer` that changes nothing in a step that is not finite, and counts it.

    A step is skipped if a gradient contains an Inf or NaN, or exceeds 2^62, so that optimizers
    could not square it. With gradients of `jfp8.nnx.value_and_grad` it is also skipped if an
    operand of an FP8 matmul contains an Inf or NaN. Then parameters and the optimizer's state do
    not change, bit for bit; only `step` increases and the loss scale falls.

    Attributes:
      step: u32[], number of calls of `update`, skipped ones included.
      skipped_steps: i32[], number of skipped steps.
      skipped_in_a_row: i32[], number of consecutive skipped steps until now.
      tx, opt_state, wrt: see `flax.nnx.Optimizer`.

    >>> import jax.numpy as jnp, jfp8, optax
    >>> from flax import nnx
    >>> model = jfp8.nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> optimizer = jfp8.nnx.Optimizer(model, optax.adam(1e-3))
    >>> loss, grads = jfp8.nnx.value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((2, 3)))
    >>> _ = optimizer.update(model, grads)
    >>> int(optimizer.step[...]), int(optimizer.skipped_steps[...])
    (1, 0)
    """

    __signature__: Any = SignatureOfClass()

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
    ):
        """Create the optimizer's state.

        Args:
          model: an NNX module.
          tx: an Optax optimizer.
          wrt: filter of the Variables of `model` that are trained.
        """
        if not hasattr(tx, "init"):
            raise TypeError(f"tx must be an optimizer, such as optax.adam(1e-3), got {tx!r:.40}.")
        super().__init__(model, tx, wrt=wrt)
        self.skipped_steps = nnx.OptState(jnp.zeros((), jnp.int32))
        self.skipped_in_a_row = nnx.OptState(jnp.zeros((), jnp.int32))

    def update(self, model: M, grads: Any = None, /, **kwargs: Any) -> optax.Updates:
        """Update `model` and the optimizer's state by one step, unless it is skipped.

        Args:
          model: the model that the optimizer was created for.
          grads: gradients from `jfp8.nnx.value_and_grad` or `flax.nnx.grad`, times the loss scale
            if there is one.
          kwargs: passed on to `tx`, such as ``value=loss`` for ``optax.polyak_sgd``.

        Returns:
          The updates, with the structure of the trained parameters; NaN in a skipped step.

        Raises:
          TypeError: no `grads`.

        Warns:
          UserWarning: the last 10 steps were skipped, or the loss scale is at its least value. Not
            under ``jit``: see `metrics`.
        """
        if grads is None:  # Flax before 0.11 took gradients alone
            raise TypeError("update takes the model first: optimizer.update(model, grads).")
        params = nnx.as_pure(nnx.state(model, self.wrt))
        opt_state: Any = nnx.as_pure(self.opt_state)
        taken = nnx.as_pure(nnx.state(grads, self.wrt))
        scale = find_loss_scale(opt_state)
        finite = all_squares_finite(unscaled(taken, None if scale is None else scale.loss_scale))
        # A loss scale looks for NaN. Without one, the check and clipping share a read of gradients.
        given = taken if scale is None else nan_unless(finite, taken)
        try:
            updates, new = self.tx.update(given, opt_state, params, **nnx.as_pure(kwargs))
        except Exception as error:
            note_other_optimizer(error, self.tx, opt_state, params)
            raise
        nnx.update(model, if_finite(finite, apply_updates(params, updates), params))
        nnx.update(self.opt_state, nnx.state(if_finite(finite, new, opt_state)))
        skipped, in_a_row = jnp.where(finite, 0, 1), self.skipped_in_a_row[...]
        counted = self.step[...] + 1, self.skipped_steps[...] + skipped, (in_a_row + 1) * skipped
        self.step[...], self.skipped_steps[...], self.skipped_in_a_row[...] = merged(counted)
        tell(self.skipped_in_a_row[...], new)
        return nan_unless(finite, updates)

    def metrics(
        self, model: nnx.Module | None = None, *, per_tensor: bool = False, warn: bool = False
    ) -> dict[str, jax.Array]:
        """Return scalars about the last steps for a logger, inside and outside ``nnx.jit``.

        Args:
          model: the model, for the metrics of its amax histories, which are left out without it.
          per_tensor, warn: see `jfp8.metrics`, which lists all metrics.

        >>> import jfp8, optax
        >>> from flax import nnx
        >>> model = jfp8.nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> sorted(jfp8.nnx.Optimizer(model, optax.adam(1e-3)).metrics())
        ['skipped_in_a_row', 'skipped_steps']
        """
        histories = None
        if model is not None:
            found = training_products((model,)).items()
            histories = {"/".join(map(str, path[1:])): p.histories() for path, p in found}
        counters = self.skipped_steps[...], self.skipped_in_a_row[...]
        return metrics_of(*counters, nnx.as_pure(self.opt_state), histories, per_tensor, warn)
