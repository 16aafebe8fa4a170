"""Amax histories of Flax's own FP8 layers, ``flax.linen.fp8_ops``.

Flax stores, in the collection ``_overwrite_with_gradient``, for every matmul::

    input_amax_history, kernel_amax_history, output_grad_amax_history    f32[..., H], H = 1024
    input_scale, kernel_scale, output_grad_scale                         f32[..., 1]

Its ``scale`` means the same as ours, ``x ~= data * scale``, and is computed from the history before
the step, as ours is when it is used. So only the history has to be imported: the next step has the
scales that Flax would have used, ``max(history) / fmt.max``, up to rounding of the division. The
two differ in these cases:

  * A history that is all zeros: Flax keeps its scale, 1 in the first step; here the amax of the
    tensor itself is used until there is an entry.
  * Inf or NaN in a history: Flax keeps its scale while they stay in the window; here they
    are ignored.
  * A tensor of zeros: Flax pushes a zero, here the history does not change. So the newest H entries
    may reach further back.

References:
  ``flax/linen/fp8_ops.py`` of Flax 0.12: ``Fp8DotGeneralBase``, ``update_fp8_meta``,
  ``compute_amax_history``, https://github.com/google/flax/blob/main/flax/linen/fp8_ops.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.tree import Nested, Path, described, nested, walk
from jfp8.layers.linen.state_in_gradients import NAME, histories_in

COLLECTION = "_overwrite_with_gradient"

_ROLES = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
_NAMES = {f"{tensor}_{part}" for tensor in _ROLES.values() for part in ("amax_history", "scale")}


def from_flax_fp8_ops(variables: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `variables` of a model with Flax's FP8 layers to variables of the model with jfp8's.

    Args:
      variables: variables of ``model.init`` or a training loop: ``params``,
        ``_overwrite_with_gradient``, and any other collections; or their state dict.
      target: the variables of the model with layers of jfp8, arrays or shapes: it sets the names
        of matmuls and the lengths of histories.

    Returns:
      `variables` without ``_overwrite_with_gradient``, but with ``fp8`` and ``fp8_sink`` like
      `target`. The rest is unchanged; `jfp8.checkpoint.upgrade` checks that it fits.

    Raises:
      ValueError: `variables` has no such collection, or another entry in it.

    Warns:
      CheckpointChange: a history changes its length, has no counterpart, or is missing.

    >>> import warnings
    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> from flax.linen import fp8_ops
    >>> x = jnp.ones((16, 16))
    >>> flax_layer = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    >>> variables = flax_layer.init(jax.random.key(0), x)
    >>> target = jfp8.Dense(16).init(jax.random.key(0), x)
    >>> with warnings.catch_warnings(action="ignore"):
    ...     imported = jfp8.checkpoint.from_flax_fp8_ops(variables, target)
    >>> sorted(imported), imported["fp8"]["DotGeneral_0"]["lhs"]["amax_history"].shape
    (['fp8', 'fp8_sink', 'params'], (16,))
    """
    log = Log()
    if not isinstance(variables, Mapping) or COLLECTION not in variables:
        raise ValueError(
            f"variables has no collection {COLLECTION!r}, in which Flax's FP8 layers store their "
            f"state; it is {described(variables)}. Pass all collections, {{'params': ..., "
            f"{COLLECTION!r}: ...}}; those of a Flax TrainState are state.params."
        )
    found = as_fp8(nested(variables[COLLECTION]), nested(target), (COLLECTION,), log)
    collections = histories.filled(target, found, log)
    log.close(strict=False)
    others = {name: node for name, node in variables.items() if name != COLLECTION}
    return {**others, **collections}


def as_fp8(collection: Any, target: Any, path: Path, log: Log) -> Nested:
    """Convert Flax's `collection`, at `path`, to the layout of ``fp8`` in the nested `target`."""
    found: dict[Path, histories.Tensors] = {}
    for at, node in walk(collection, until=lambda node: set(node) >= _NAMES or set(node) == {NAME}):
        if not isinstance(node, dict):
            log.problem((*path, *at), f"{described(node)}, which is no state of Flax's FP8 layers")
        elif NAME in node:  # A jfp8 model with this `state_collection`
            tensors = histories_in(node)
            found[at] = {role: np.asarray(tensors[role]["amax_history"]) for role in _ROLES}
        else:
            rings = {role: node[f"{name}_amax_history"] for role, name in _ROLES.items()}
            if histories.are_alike(rings):
                found[at] = {role: histories.unrolled(ring) for role, ring in rings.items()}
            else:
                shapes = ", ".join(map(described, rings.values()))
                log.problem((*path, *at), f"histories are {shapes}, not f32 arrays of one shape")
    return histories.renamed(found, target.get("fp8", {}), path, log)
