"""Shardings of an optimizer's state and of FP8 trees, derived from the parameters' shardings."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfp8.optim.stored_state import is_stored
from jfp8.optim.wrapping import transformation
from jfp8.tracing.shardings import trimmed


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
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
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
    of_params = dict(zip((_bare(path) for path, _ in leaves), of_leaves, strict=True))
    for path, sharding in of_params.items():
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"state_shardings: the sharding of params{jax.tree_util.keystr(path)} is "
                f"{sharding!r}, but only a NamedSharding names the mesh axis of each dimension: "
                "jax.sharding.NamedSharding(mesh, PartitionSpec('data'))."
            )
    shapes = {_bare(path): leaf.shape for path, leaf in leaves}

    def sharding_of(owner: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding | None:
        return of_params[owner] if len(leaf.shape) == len(shapes[owner]) else None

    return _like_owners(jax.eval_shape(tx.init, params), of_params, of_leaves[0].mesh, sharding_of)


def shardings(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Return shardings that place `tree`, with arrays in FP8, by the specs of plain parameters. ::

        placed = jax.device_put(tree, jfp8.shardings(tree, mesh, specs))

    A leaf of `tree` belongs to the parameter whose path its own path contains: codes and scales of
    a `ScaledArray`, moments, masters. Each of its dimensions is partitioned like the parameter's,
    if the mesh divides it; scales of blocks have fewer elements. What belongs to no parameter
    (counters, amax histories), and what has fewer dimensions than the spec, is replicated.

    Args:
      tree: quantized parameters, an optimizer's state or a whole `TrainState`; arrays or
        ``jax.ShapeDtypeStruct``.
      mesh: the mesh, with explicit or automatic axes.
      specs: a ``PartitionSpec`` (or None) for each parameter, in the structure of the plain
        parameters, such as ``flax.linen.get_partition_spec`` returns; or one for all.

    Returns:
      Tree of ``NamedSharding`` of the structure of `tree`.

    Raises:
      TypeError: an entry of `specs` is not a ``PartitionSpec``.
      ValueError: an entry of `specs` to which no leaf of `tree` belongs.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> params = jfp8.quantize_params({"dense": {"kernel": jnp.ones((256, 256))}}, "block")
    >>> specs = {"dense": {"kernel": jax.P(None, "data")}}
    >>> placed = jax.device_put(params, jfp8.shardings(params, mesh, specs))
    >>> tuple(placed["dense"]["kernel"].scale.sharding.spec)
    (None, 'data')
    """
    is_spec = lambda node: node is None or isinstance(node, PartitionSpec)
    given, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    of_params, unused = {}, set()
    for path, spec in given:
        if not is_spec(spec):
            raise TypeError(
                f"shardings: specs{jax.tree_util.keystr(path)} is {spec!r}, but must be a "
                "PartitionSpec, such as jax.P('data', None), or None for a replicated parameter."
            )
        of_params[_bare(path)] = NamedSharding(mesh, spec or PartitionSpec())
        unused.add(_bare(path))

    def sharding_of(owner: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding | None:
        unused.discard(owner)
        return of_params[owner] if len(leaf.shape) >= len(of_params[owner].spec) else None

    found = _like_owners(tree, of_params, mesh, sharding_of)
    if unused:
        names = ", ".join(sorted(map(jax.tree_util.keystr, unused)))
        raise ValueError(
            f"shardings: specs has entries to which nothing in the tree belongs: {names}. Give "
            "specs the structure of the plain parameters that the tree was made from."
        )
    return found


def _like_owners(tree: Any, owners: Container, mesh: Mesh, sharding_of: Callable[..., Any]) -> Any:
    """Return the trimmed sharding of the owner of each leaf; without an owner, replicate it."""

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        owner = _contained(_bare(path), owners)
        sharding = None if owner is None else sharding_of(owner, leaf)
        if sharding is None:
            return NamedSharding(mesh, PartitionSpec())
        return trimmed(sharding, leaf.shape)

    return jax.tree_util.tree_map_with_path(place, tree)


def _bare(path: jax.tree_util.KeyPath) -> jax.tree_util.KeyPath:
    """Return `path` without the steps into variables of NNX and boxes of Linen."""
    return tuple(key for key in path if getattr(key, "name", None) != "value")


def _contained(path: jax.tree_util.KeyPath, paths: Container) -> jax.tree_util.KeyPath | None:
    """Find the part of `path` that is one of `paths`: of several, the longest of the last."""
    for end in range(len(path), -1, -1):
        for start in range(end + 1):
            if path[start:end] in paths:
                return path[start:end]
    return None
