"""`downgrade`: what a model without FP8 needs from a training state or from variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jfp8.checkpoint.flax_fp8_ops import COLLECTION
from jfp8.checkpoint.values import from_fields
from jfp8.layers.nnx.products import Fp8Sink, Fp8State
from jfp8.scaling.arrays import ScaledArray
from jfp8.training.state import TrainState

_LEFT_OUT = ("fp8", "fp8_sink", COLLECTION)


def downgrade(state: Any, *, dtype: jax.typing.DTypeLike = "float32") -> Any:
    """The variables of the same model without jfp8: no FP8 state, parameters in high precision.

    Parameters that are stored in FP8 get the values that products used, ``data * scale``; all
    others stay as they are, bit for bit. To go on training in high precision, from the master
    weights and with the moments of the optimizer, make the training state of the plain model, and
    call `jfp8.checkpoint.upgrade` with it as the target.

    Args:
      state: a `jfp8.TrainState`, the variables of a model, a state dict of either, or an NNX state.
      dtype: floating dtype of parameters that were in FP8.

    Returns:
      For Linen ``{"params": ..., "batch_stats": ...}``, without ``fp8`` and ``fp8_sink``. For NNX a
      state without `jfp8.nnx.Fp8State`.

    Raises:
      TypeError: `state` is none of these.
      ValueError: there are no ``params``.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> from jfp8.checkpoint.downgrade import downgrade
    >>> variables = jfp8.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))
    >>> sorted(variables), sorted(downgrade(variables))
    (['fp8', 'fp8_sink', 'params'], ['params'])
    """
    if isinstance(state, nnx.State):
        return _plain_nnx(state, dtype)
    if isinstance(state, TrainState):
        state = {**state.collections, "params": state.params}
    if not isinstance(state, Mapping):
        raise TypeError(
            "downgrade takes a jfp8.TrainState, variables, a state dict or an NNX state, got "
            f"{type(state).__name__}. Of an NNX model pass nnx.state(model)."
        )
    collections = dict(state)
    if "opt_state" in collections:  # the state dict of a training state
        del collections["opt_state"]
        collections.pop("step", None)
        collections |= collections.pop("collections", {})
    if "params" not in collections:
        raise ValueError(
            f"There are no 'params' among {sorted(map(str, collections))}. Pass all variables, "
            '{"params": params}, rather than the parameters themselves.'
        )
    kept = {name: node for name, node in collections.items() if name not in _LEFT_OUT}
    return {**kept, "params": _high_precision(kept["params"], dtype)}


def _high_precision(tree: Any, dtype: jax.typing.DTypeLike) -> Any:
    """`tree` with values for every `ScaledArray`, also where it has become a dict."""
    stored = tree if isinstance(tree, ScaledArray) else from_fields(tree)
    if isinstance(stored, ScaledArray):
        return jax.tree.map(jax.numpy.asarray, stored).dequantize(dtype)
    if isinstance(tree, Mapping):
        return {name: _high_precision(node, dtype) for name, node in tree.items()}
    return tree


def _plain_nnx(state: nnx.State, dtype: jax.typing.DTypeLike) -> nnx.State:
    kept = {}
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, Fp8State | Fp8Sink):
            continue
        value = variable.get_value()
        stored = isinstance(value, ScaledArray)
        kept[path] = variable.replace(value.dequantize(dtype)) if stored else variable
    return nnx.from_flat_state(kept)
