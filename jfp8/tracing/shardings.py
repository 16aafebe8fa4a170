"""Shardings of arrays whose dimensions belong to another array's: scales, moments, states."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jfp8.tracing.device import explicit_mesh


def shards_along(sharding: NamedSharding, ndim: int) -> list[int]:
    """Return into how many shards each of `ndim` dimensions is divided."""
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    names = [e if isinstance(e, tuple) else () if e is None else (e,) for e in entries]
    return [math.prod(sharding.mesh.shape[name] for name in each) for each in names]


def trimmed(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Adapt `sharding` to `shape`; dimensions that it does not divide are not split."""
    entries = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    shards = shards_along(sharding, len(shape))
    kept = [e if n % k == 0 else None for e, n, k in zip(entries, shape, shards, strict=True)]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept), memory_kind=sharding.memory_kind)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding in the type of `x` if its mesh has explicit axes, else None."""
    if not isinstance(x, jax.Array):
        return None
    sharding: Any = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def sharded_like(like: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, sharded like the arrays `like`, where these divide it.

    With explicit axes each operation must know the sharding of its result, which JAX cannot tell
    after reshapes into blocks and sums over sharded dimensions. Here the axes are automatic inside
    `function`, which must not use arrays from outside. Its results have types again: dimensions are
    sharded like the same dimensions of the array in `like`, a tree of results or a prefix of one.
    Results with another number of dimensions are replicated. `like` may have specs for arrays.
    """
    mesh = explicit_mesh(like, arguments) or jax.sharding.get_abstract_mesh()

    def explicit(entry: Any) -> tuple[str, ...]:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in mesh.explicit_axes)

    def sharding_of(x: Any) -> NamedSharding | None:
        if not isinstance(x, PartitionSpec):
            return explicit_sharding(x)
        return NamedSharding(mesh, PartitionSpec(*map(explicit, x))) if mesh.explicit_axes else None

    if not any(map(sharding_of, jax.tree.leaves(like))):
        return function(*arguments)
    with jax.sharding.use_abstract_mesh(automatic(mesh)):
        found = function(*jax.tree.map(partial(_resharded, PartitionSpec()), arguments))

    def typed(x: Any, y: jax.Array) -> jax.Array:
        sharding = sharding_of(x)
        fits = len(x) <= y.ndim if isinstance(x, PartitionSpec) else x.ndim == y.ndim
        return _resharded(trimmed(sharding, y.shape).spec if sharding and fits else jax.P(), y)

    with jax.sharding.use_abstract_mesh(mesh):
        return jax.tree.map(lambda x, part: jax.tree.map(partial(typed, x), part), like, found)


def automatic(mesh: Any) -> Any:
    """Return `mesh`, or its abstract mesh with automatic axes in place of explicit ones."""
    types = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    return mesh.abstract_mesh.update_axis_types(types) if types else mesh


def _resharded(spec: PartitionSpec, x: Any) -> Any:
    return jax.sharding.reshard(x, spec) if isinstance(x, jax.Array) else x
