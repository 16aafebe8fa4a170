"""Products on meshes whose axes are part of the types of arrays (``AxisType.Explicit``).

There each operation must say how its result is laid out over the devices, and for sums over sharded
dimensions, of which the backward pass has many, JAX asks the caller. For the three products of one
operation the answer is always the same: a gradient is laid out like the array that it belongs to.
So the compiler decides everything inside, and only the results have types with shardings again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfp8.products.operation import Observed, Operand, State
from jfp8.scaling.arrays import ScaledArray


def with_result_like(
    reference: Callable[..., jax.Array],
    function: Callable[..., tuple[jax.Array, Observed]],
    lhs: jax.Array,
    rhs: Operand,
    state: State,
) -> tuple[jax.Array, Observed]:
    """``function(lhs, rhs, state=state)``, laid out over the devices like ``reference(lhs, rhs)``.

    Args:
      reference: JAX's own operation, of the values of `lhs` and `rhs`; it is not computed.
      function: of arrays, none of whose axes are explicit inside of it.
      lhs, rhs, state: its arguments.

    Raises:
      jax.errors.ShardingTypeError: JAX cannot tell from the operands how the result is laid out.
    """
    widened = lambda *arrays: reference(*(x.astype(jnp.float32) for x in arrays))
    data = rhs.data if isinstance(rhs, ScaledArray) else rhs
    everywhere = PartitionSpec()
    # Arrays that were never laid out have no sharding.
    layouts = (jax.eval_shape(widened, lhs, data).sharding or everywhere, everywhere)
    automatic: Callable[..., Any] = jax.sharding.auto_axes(
        lambda lhs, rhs, state: function(lhs, rhs, state=state), out_sharding=layouts
    )
    return automatic(lhs, rhs, state)


def with_layout_of(
    like: jax.Array, function: Callable[..., tuple[jax.Array, Any]], *arguments: Any
) -> tuple[jax.Array, Any]:
    """``function(*arguments)``, whose first result is laid out over the devices as `like` is.

    Args:
      like: an array of the rank of that result.
      function: of arrays, none of whose axes are explicit inside of it.
      arguments: pytrees.
    """
    layouts = jax.typeof(like).sharding.spec, PartitionSpec()
    automatic: Callable[..., Any] = jax.sharding.auto_axes(function, out_sharding=layouts)
    return automatic(*arguments)
