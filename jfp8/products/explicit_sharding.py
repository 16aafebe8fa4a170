"""Products on meshes whose axes are part of the types of arrays (``AxisType.Explicit``).

There each operation must say how its result is laid out over the devices, and for sums over sharded
dimensions, of which the backward pass has many, JAX asks the caller. For the three products of one
operation the answer is always the same: a gradient is laid out like the array that it belongs to.
So the compiler decides everything inside, and only the results have types with shardings again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jfp8.products.operation import Observed, Operand
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.device import explicit_mesh_of


def in_mesh_of_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function` in the mesh whose explicit axes are in the types of its arguments.

    ``jax.jit`` compiles for a mesh that only they name; without it in effect JAX would ask for the
    layout of sums in the backward pass. A mesh that is in effect stays.
    """

    @functools.wraps(function)
    def call(*args: Any, **how: Any) -> Any:
        mesh = explicit_mesh_of(args, how)
        inside = contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)
        with inside:
            return function(*args, **how)

    return call


def check_divided(mesh: Any, names: tuple[Any, ...], batch: Any, whole: Any) -> None:
    """Raise ``ValueError`` if types of arrays do not say that explicit axes divide the batch.

    Args:
      names: axes of `mesh`.
      whole: True for arrays that are not to be divided; a tree like `batch`.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name in names if types[name] == AxisType.Explicit}
    wholes = jax.tree.leaves(whole) if explicit else []
    for x in (x for x, is_whole in zip(jax.tree.leaves(batch), wholes) if not is_whole):
        axes = jax.typeof(x).sharding.spec[0]
        if not explicit.issubset(axes if isinstance(axes, tuple) else (axes,)):
            raise ValueError(
                f"data_parallel divides the batch over {names}, axes of the mesh that are explicit "
                f"(part of the types of arrays), but it was given {jax.typeof(x)}. Place the batch "
                "before: jax.device_put(batch, jax.NamedSharding(mesh, jax.P("
                f"{names if len(names) > 1 else names[0]!r}))); in jax.jit, jax.reshard. Or make "
                "the mesh with axis_types=(jax.sharding.AxisType.Auto,)."
            )


class Specs(NamedTuple):
    """How the operands and the result of an operation are divided over the devices."""

    lhs: PartitionSpec
    rhs: PartitionSpec
    y: PartitionSpec


def specs_of(reference: Callable[..., jax.Array], lhs: jax.Array, rhs: Operand) -> Specs:
    """Return the layouts of ``reference(lhs, rhs)``: JAX's own operation, which is not computed.

    Raises:
      jax.errors.ShardingTypeError: JAX cannot tell from the operands how the result is laid out.
    """
    widened = lambda *arrays: reference(*(x.astype(jnp.float32) for x in arrays))
    data = rhs.data if isinstance(rhs, ScaledArray) else rhs
    # `jax.eval_shape` drops the sharding where other axes of the mesh are not explicit.
    (y,) = jax.make_jaxpr(widened)(lhs, data).out_avals
    # Arrays that were never laid out have no sharding.
    given = [x.sharding for x in (jax.typeof(lhs), jax.typeof(data), y)]
    return Specs(*(getattr(each, "spec", PartitionSpec()) for each in given))


def with_result_like(
    specs: Specs, function: Callable[..., tuple[jax.Array, Observed]], *arguments: Any
) -> tuple[jax.Array, Observed]:
    """Return ``function(*arguments)``, whose result is laid out as `specs` say.

    Args:
      specs: see `specs_of`.
      function: of arrays, none of whose axes are explicit inside of it.
      arguments: pytrees.
    """
    automatic: Callable[..., Any] = jax.sharding.auto_axes(
        function, out_sharding=(specs.y, PartitionSpec())
    )
    return automatic(*arguments)


def with_layout_of(
    like: jax.Array, function: Callable[..., tuple[jax.Array, Any]], *arguments: Any
) -> tuple[jax.Array, Any]:
    """Call ``function(*arguments)``; its first result is laid out over the devices like `like`.

    Args:
      like: an array of the rank of that result.
      function: of arrays, none of whose axes are explicit inside of it.
      arguments: pytrees.
    """
    layouts = jax.typeof(like).sharding.spec, PartitionSpec()
    automatic: Callable[..., Any] = jax.sharding.auto_axes(function, out_sharding=layouts)
    return automatic(*arguments)
