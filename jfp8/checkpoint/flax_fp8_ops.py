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

from jfp8.checkpoint.tree import described
from jfp8.checkpoint.upgrade import upgrade
from jfp8.layers.linen.state_in_gradients import OVERWRITTEN


def from_flax_fp8_ops(variables: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `variables` of a model with Flax's FP8 layers to variables of the model with jfp8's.

    Args:
      variables: variables of ``model.init`` or a training loop: ``params``,
        ``_overwrite_with_gradient``, and any other collections; or their state dict.
      target: the variables of the model with layers of jfp8, arrays or shapes: it sets the names
        of matmuls and the lengths of histories.

    Returns:
      `variables` with ``fp8`` and ``fp8_sink`` in place of ``_overwrite_with_gradient``. The rest
      is what `jfp8.checkpoint.upgrade` returns.

    Raises:
      ValueError: `variables` has no such collection, or another entry in it; or does not fit.

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
    if not isinstance(variables, Mapping) or OVERWRITTEN not in variables:
        raise ValueError(
            f"variables has no collection {OVERWRITTEN!r}, in which Flax's FP8 layers store their "
            f"state; it is {described(variables)}. Pass all collections, {{'params': ..., "
            f"{OVERWRITTEN!r}: ...}}; those of a Flax TrainState are state.params."
        )
    return upgrade(variables, target)
