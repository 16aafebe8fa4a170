"""Weight gradients in FP8, between the backward pass and the optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfp8.collectives import exchange as collectives
from jfp8.optim.wrapping import AnyScaleState
from jfp8.scaling.formats import E4M3FN, FormatLike, as_format
from jfp8.scaling.granularity import Granularity, PerTensor
from jfp8.scaling.quantization import quantize


def fp8_gradients(
    fmt: FormatLike | None = None,
    *,
    granularity: Granularity = PerTensor(),
    axis_name: Any = None,
) -> optax.GradientTransformation:
    """Round gradients of weights to FP8; with `axis_name`, average them over devices in FP8. ::

        axis_name=None:   g <- dequantize(quantize(g, fmt, scale = 2^k >= amax(g) / fmt.max))
        otherwise:        g <- collectives.pmean(g, axis_name)

    Arrays of fewer than two dimensions, gradients of biases and norms, are not rounded. A NaN stays
    NaN and an Inf becomes NaN, for the optimizer or a loss scale to detect. A loss scale changes
    only the scales. Sum micro-batches before this, in f32, as `jfp8.value_and_grad` does.

    With `axis_name`, use it under ``jax.shard_map`` or ``jax.pmap`` in a loop that has local
    gradients, in front of everything that checks whether they are finite: then all devices skip the
    same steps. Under a plain ``jit``, and for a `jfp8.TrainState`, use `jfp8.data_parallel`.

    Args:
      fmt: format of the gradients; None means E4M3FN, or with `axis_name` the default of
        `jfp8.collectives.pmean`.
      granularity: the elements that share a scale, ``Block((128,))`` for example. With `axis_name`
        blocks are as in `jfp8.collectives.pmean`.
      axis_name: mapped axis, or axes, over which the gradients are averaged.

    Returns:
      A stateless ``optax.GradientTransformation`` that keeps dtypes.

    Raises:
      ValueError: both `granularity` and `axis_name`.
      TypeError: `fmt` is not a format.

    References:
      MS-AMP O1, FP8 weight gradients (arXiv 2310.18313, section 2.1).

    >>> import jax.numpy as jnp, jfp8
    >>> tx = jfp8.optim.fp8_gradients()
    >>> tx.update({"w": jnp.array([[0.3, 448.0]])}, tx.init({}))[0]
    {'w': Array([[3.125e-01, 4.480e+02]], dtype=float32)}
    """
    fmt = None if fmt is None else as_format(fmt)
    if axis_name is not None and granularity != PerTensor():
        raise ValueError(
            f"fp8_gradients(granularity={granularity!r}, axis_name={axis_name!r}): gradients "
            "averaged over devices have the blocks of jfp8.collectives.pmean. Drop one of the two."
        )

    def rounded(g: Any) -> Any:
        if not _is_weight_gradient(g):
            return g
        # Powers of two, as in MS-AMP: the result fits into 16 bits as well.
        q = quantize(g, fmt or E4M3FN, granularity=granularity, scale_rounding="power_of_two")
        # The largest numbers of the dtype would round up to Inf, after all checks for it.
        largest = jnp.finfo(g.dtype).max
        return jnp.clip(q.dequantize(g.dtype), -largest, largest)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        if axis_name is not None:
            return collectives.pmean(updates, axis_name, fmt=fmt or collectives.FINEST), state
        return jax.tree.map(rounded, updates), state

    return optax.GradientTransformation(lambda params: AnyScaleState(), update)


def _is_weight_gradient(g: Any) -> bool:
    """Return True for a floating matrix, no placeholder and not in FP8 already."""
    dtype = getattr(g, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return g.ndim >= 2 and dtype.itemsize > 1
