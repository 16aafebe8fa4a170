"""Matmuls on meshes whose axes are part of the types of arrays (``AxisType.Explicit``).

With explicit axes each operation must specify the sharding of its result. JAX asks the caller for
the sharding of every sum over sharded dimensions, frequent in the backward pass. For the three
matmuls of one operation the answer is always the same: a gradient has the sharding of its primal.
So the compiler chooses all shardings inside, and only the results have explicit types again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import Partial

from jfp8.products.differentiated import CustomVjp
from jfp8.products.operation import Operand
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.compat import same_varying_axes


def check_divided(mesh: Any, names: tuple[Any, ...], batch: Any, whole: Any) -> None:
    """Raise ``ValueError`` unless the types of arrays shard the batch over explicit axes.

    Axes of `names` that are not explicit are left alone, and so are arrays that are `whole`.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name in names if types[name] == AxisType.Explicit}
    wholes = jax.tree.leaves(whole) if explicit else []
    for x in (x for x, is_whole in zip(jax.tree.leaves(batch), wholes) if not is_whole):
        axes = jax.typeof(x).sharding.spec[0]
        if not explicit.issubset(axes if isinstance(axes, tuple) else (axes,)):
            raise ValueError(
                f"data_parallel shards the batch over {names}, axes of the mesh that are explicit "
                f"(part of the types of arrays), but it was given {jax.typeof(x)}. Place the batch "
                "first: jax.device_put(batch, jax.NamedSharding(mesh, jax.P("
                f"{names if len(names) > 1 else names[0]!r}))); in jax.jit, jax.reshard. Or create "
                "the mesh with axis_types=(jax.sharding.AxisType.Auto,)."
            )


class Specs(NamedTuple):
    """The shardings of the operands and the result of an operation."""

    lhs: PartitionSpec
    rhs: PartitionSpec
    y: PartitionSpec

    @property
    def are_complete(self) -> bool:
        """Return whether the mesh in effect shards nothing along axes that are not explicit."""
        mesh = jax.sharding.get_abstract_mesh()
        types = [t for n, t in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if n > 1]
        return all(each == AxisType.Explicit for each in types)


def specs_of(reference: Callable[..., jax.Array], lhs: jax.Array, rhs: Operand) -> Specs:
    """Return the shardings of ``reference(lhs, rhs)``, JAX's operation, without computing it."""
    widened = lambda *arrays: reference(*(x.astype(jnp.float32) for x in arrays))
    data = rhs.data if isinstance(rhs, ScaledArray) else rhs
    # `jax.eval_shape` drops the sharding if other axes of the mesh are not explicit.
    (y,) = jax.make_jaxpr(widened)(lhs, data).out_avals
    # Arrays that were never placed have no sharding.
    given = [getattr(x, "sharding", None) for x in (jax.typeof(lhs), jax.typeof(data), y)]
    return Specs(*(getattr(each, "spec", PartitionSpec()) for each in given))


def with_result_like(
    spec: PartitionSpec, function: Callable[..., tuple[jax.Array, Any]], *arguments: Any
) -> tuple[jax.Array, Any]:
    """Call `function` without explicit axes inside, and shard its first result as `spec`."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return _automatic(function, (spec, PartitionSpec()))(*arguments)
    return _between_manual_axes(spec, function, same_varying_axes(arguments))


def _automatic(function: Callable[..., Any], out_sharding: Any) -> Callable[..., Any]:
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)


# JAX takes no arrays without explicit types out of a ``shard_map`` over other axes of the mesh,
# where residuals go. So these get the types of the arguments that have their shapes.


@partial(CustomVjp, nondiff_argnums=(0, 1))
def _between_manual_axes(
    spec: PartitionSpec, function: Callable[..., Any], arguments: Any
) -> tuple[jax.Array, Any]:
    return _automatic(function, (spec, PartitionSpec()))(*arguments)


def _forward(spec: PartitionSpec, function: Callable[..., Any], primals: Any) -> Any:
    leaves, structure = jax.tree.flatten(primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    values = [x.value for x in leaves]
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    trained = [i for i, x in enumerate(leaves) if x.perturbed and is_float(x.value)]
    specs = [jax.typeof(x).sharding.spec for x in values]
    made: dict[str, Any] = {}

    def of_trained(values: Any, *some: Any) -> Any:
        given = dict(zip(trained, some, strict=True))
        return function(*structure.unflatten([given.get(i, x) for i, x in enumerate(values)]))

    def with_residuals(*values: Any) -> Any:
        of_some = partial(of_trained, values)
        y, vjp, observed = jax.vjp(of_some, *(values[i] for i in trained), has_aux=True)
        saved, made["vjp"] = jax.tree.flatten(vjp)
        return (y, observed), saved

    def backward(saved: Any, dy: jax.Array) -> Any:
        derive = lambda saved, dy: made["vjp"].unflatten(saved)(dy)
        grads = _automatic(derive, tuple(specs[i] for i in trained))(saved, dy)
        of_leaf = dict(zip(trained, grads, strict=True))
        return structure.unflatten([of_leaf.get(i) for i in range(len(leaves))])

    by_shape = {x.shape: each for x, each in zip(values, specs, strict=True)}
    _, shapes = jax.eval_shape(_automatic(with_residuals, PartitionSpec()), *values)
    saved_as = [by_shape.get(x.shape, PartitionSpec()) for x in shapes]
    results = _automatic(with_residuals, ((spec, PartitionSpec()), saved_as))
    out, saved = results(*values)
    return out, Partial(backward, saved)


_between_manual_axes.defvjp(
    _forward,
    lambda spec, function, backward, cotangents: (backward(cotangents[0]),),
    symbolic_zeros=True,
)
