"""Shardings of an optimizer's state, derived from the parameters' shardings."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jfp8.optim.stored_state import is_stored
from jfp8.optim.wrapping import transformation


def state_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any) -> Any:
    """Return shardings for ``tx.init(params)``: each leaf is sharded like its parameter.

    A leaf of the state belongs to the parameter whose path its own path contains: the one at
    ``(..., "mu", "dense", "kernel", "scale")`` to ``("dense", "kernel")``. Each of its dimensions
    is partitioned like the parameter's, if the mesh divides it; dimensions of block scales are
    shorter. All other leaves are replicated.

    Args:
      tx: the optimizer, such as `optim.adamw`.
      params: the parameters, or ``jax.ShapeDtypeStruct`` instead.
      shardings: a ``NamedSharding`` for each parameter, or one for all; all of the same mesh.

    Returns:
      Tree of ``NamedSharding`` of the structure of ``tx.init(params)``.

    Raises:
      TypeError: `tx` is not a transformation, or a sharding is not a ``NamedSharding``.
      ValueError: `shardings` does not match `params`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from jfp8.optim.state_shardings import state_shardings
    >>> params = {"w": jnp.ones((64, 256))}
    >>> rows = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    >>> tx = optax.adam(1e-3)
    >>> found = state_shardings(tx, params, {"w": rows})
    >>> tuple(found[0].mu["w"].spec), tuple(found[0].count.spec)
    (('data', None), ())
    >>> state = jax.jit(tx.init, out_shardings=found)(params)
    """
    tx = transformation("state_shardings", tx)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
    of_leaves = [shardings] * len(leaves)
    if not isinstance(shardings, NamedSharding):
        of_leaves = structure.flatten_up_to(shardings)
    of_params = dict(zip((path for path, _ in leaves), of_leaves, strict=True))
    for path, sharding in of_params.items():
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"state_shardings: the sharding of params{jax.tree_util.keystr(path)} is "
                f"{sharding!r}, but only a NamedSharding names the mesh axis of each dimension: "
                "jax.sharding.NamedSharding(mesh, PartitionSpec('data'))."
            )
    ndims = {path: len(leaf.shape) for path, leaf in leaves}
    replicated = NamedSharding(of_leaves[0].mesh, PartitionSpec())

    def sharding_of(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        owner = _contained(path, of_params)
        if owner is None or len(leaf.shape) != ndims[owner]:
            return replicated
        return trimmed(of_params[owner], leaf.shape)

    return jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(tx.init, params))


def _contained(path: jax.tree_util.KeyPath, paths: Container) -> jax.tree_util.KeyPath | None:
    """Find the part of `path` that is one of `paths`: of several, the longest of the last."""
    for end in range(len(path), -1, -1):
        for start in range(end + 1):
            if path[start:end] in paths:
                return path[start:end]
    return None


def trimmed(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Adapt `sharding` to `shape`; dimensions that it does not divide are not split."""
    entries = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))

    def parts(entry: Any) -> int:
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        return math.prod(sharding.mesh.shape[name] for name in names)

    kept = [e if n % parts(e) == 0 else None for e, n in zip(entries, shape, strict=True)]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept), memory_kind=sharding.memory_kind)
