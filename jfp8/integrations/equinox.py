"""Equinox: a module with FP8 matmuls, whose amax histories are leaves of it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from jfp8.conversion.function import Fp8Function
from jfp8.conversion.models import convert as convert_any
from jfp8.conversion.selection import Recipes
from jfp8.recipes.per_tensor import DelayedScaling


class Fp8Module(eqx.Module):
    """Call a module of Equinox with FP8 matmuls.

    Attributes:
      model: the original, with the weights.
      state: the amax histories by the path of the weight, whose gradients are their next values.
      function: the call of `model`, converted.
    """

    model: eqx.Module
    state: dict[str, jax.Array]
    function: Fp8Function = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `model` returns, computed with FP8 matmuls."""
        return self.function(self.model, self.state, *args, **kwargs)


def convert(
    model: eqx.Module, *args: Any, recipe: Recipes = DelayedScaling(), **options: Any
) -> Fp8Module:
    """Return `model` with FP8 matmuls.

    Under ``jax.vmap`` each example has its own scales, but one amax history for all. For one scale
    for the batch, convert the loss instead: ``jfp8.convert(loss, recipe)``.

    Args:
      model: any callable module.
      *args: the arguments of a call, or their shapes.
      recipe, **options: arguments of `jfp8.convert`, such as ``exempt=``.

    Returns:
      An `Fp8Module`. Filter its gradient and update it by `apply_updates`.
    """
    function = convert_any(_call, recipe, **options)
    return Fp8Module(model, function.init(model, *args), function)


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def apply_updates(module: Fp8Module, updates: Any, grads: Fp8Module) -> Fp8Module:
    """Return ``eqx.apply_updates(module, updates)`` with the next amax histories.

    Args:
      module: before the step.
      updates: updates of the optimizer for `module`, without updates of the state.
      grads: the gradient with respect to `module`, which holds the next state.
    """
    updated = eqx.apply_updates(module, updates)
    return eqx.tree_at(lambda m: m.state, updated, grads.state)
