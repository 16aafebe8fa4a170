"""Run an NNX model in `data_parallel`: copy its state to every device, and combine the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jfp8.layers.nnx.products import Fp8State
from jfp8.training.histories import rescaled
from jfp8.training.nnx import training_products


class OfModel(NamedTuple):
    """Hold the results of a step of a model.

    Attributes:
      params: its gradients.
      histories: the new `Fp8State`, which is the same on all devices.
      others: the changes of all other Variables except parameters; means over the devices are
        zero where nothing changes; new values of Variables that are not floating.
    """

    params: Any
    histories: Any
    others: Any


def on_arrays(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]], model: nnx.Module, n: int
) -> tuple[Callable[[Any, Any], tuple[Any, OfModel]], Any]:
    """Return `grad_fn` as a function of the arrays of `model`, and these arrays.

    Args:
      grad_fn: ``(model, batch) -> (loss, grads)``, with gradients scaled by `n` against the whole
        batch, to which the histories of the model refer.
    """
    graphdef, arrays = nnx.split(model)

    def compute(arrays: Any, batch: Any) -> tuple[Any, OfModel]:
        here = nnx.merge(graphdef, arrays)
        before = nnx.as_pure(nnx.state(here, _OTHERS))
        _rescale_histories(here, jnp.float32(n))
        value, grads = grad_fn(here, batch)
        _rescale_histories(here, 1 / jnp.float32(n))
        others = jax.tree.map(_change, nnx.as_pure(nnx.state(here, _OTHERS)), before)
        return value, OfModel(grads, nnx.state(here, Fp8State), others)

    return compute, arrays


def put_into(model: nnx.Module, step: OfModel) -> Any:
    """Update `model` with the state of a step, and return the gradients."""
    before = nnx.as_pure(nnx.state(model, _OTHERS))
    add = lambda x, change: x + change if _is_floating(x) else change
    nnx.update(model, step.histories, jax.tree.map(add, before, step.others))
    return step.params


_OTHERS = nnx.Not((nnx.Param, Fp8State))


def _change(new: Any, old: Any) -> Any:
    return new - old if _is_floating(new) else new


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _rescale_histories(model: nnx.Module, factor: Any) -> None:
    for product in training_products((model,)).values():
        product.set_histories({"grad": rescaled(product.intact_histories()["grad"], factor)})
