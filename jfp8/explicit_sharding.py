"""Products on meshes whose axes are part of the types of arrays (``AxisType.Explicit``).

There JAX asks of each operation how its result is laid out over the devices, and of sums over
spread dimensions, which the backward pass is full of, it asks the caller. The three products of one
operation are of one mind about that: a gradient is laid out like what it is the gradient by. So the
whole of it is left to the compiler, and only its results have types again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jfp8.arrays import ScaledArray
from jfp8.bilinear import Observed


def has_explicit_axes() -> bool:
    """Whether the mesh in effect has axes that are part of the types of arrays."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def with_result_like(
    reference: Callable[..., jax.Array],
    function: Callable[..., tuple[jax.Array, Observed]],
    operands: Sequence[Any],
) -> tuple[jax.Array, Observed]:
    """``function(*operands)``, with the layout of ``reference(lhs, rhs)`` over the devices.

    Args:
      reference: JAX's own operation, of the values of the first two operands; it is not computed.
      function: of all operands, none of whose axes are explicit inside of it.
      operands: lhs, rhs and whatever else `function` takes.

    Raises:
      jax.errors.ShardingTypeError: JAX cannot tell from the operands how the result is laid out.
    """
    lhs, rhs, *_ = operands
    rhs = rhs.data if isinstance(rhs, ScaledArray) else rhs
    widened = lambda *arrays: reference(*(x.astype(jnp.float32) for x in arrays))
    everywhere = PartitionSpec()
    # Arrays that nobody has laid out have no sharding.
    layouts = (jax.eval_shape(widened, lhs, rhs).sharding or everywhere, everywhere)
    automatic: Callable[..., Any] = jax.sharding.auto_axes(function, out_sharding=layouts)
    return automatic(*operands)
