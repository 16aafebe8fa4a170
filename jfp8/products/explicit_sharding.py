"""Products on meshes whose axes are part of the types of arrays (``AxisType.Explicit``).

There JAX asks of each operation how its result is laid out over the devices, and of sums over
spread dimensions, which the backward pass is full of, it asks the caller. The three products of one
operation are of one mind about that: a gradient is laid out like what it is the gradient by. So the
whole of it is left to the compiler, and only its results have types again.
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
      function: of arrays none of whose axes are explicit inside of it.
      lhs, rhs, state: what it is given.

    Raises:
      jax.errors.ShardingTypeError: JAX cannot tell from the operands how the result is laid out.
    """
    widened = lambda *arrays: reference(*(x.astype(jnp.float32) for x in arrays))
    data = rhs.data if isinstance(rhs, ScaledArray) else rhs
    everywhere = PartitionSpec()
    # Arrays that nobody has laid out have no sharding.
    layouts = (jax.eval_shape(widened, lhs, data).sharding or everywhere, everywhere)
    automatic: Callable[..., Any] = jax.sharding.auto_axes(
        lambda lhs, rhs, state: function(lhs, rhs, state=state), out_sharding=layouts
    )
    return automatic(lhs, rhs, state)
