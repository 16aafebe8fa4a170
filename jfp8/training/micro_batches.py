"""Micro-batches: the arrays of a batch that are split, and a loop over micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.scaling.sink import max_of_sinks
from jfp8.tracing.shardings import explicit_sharding, shards_along
from jfp8.training.hoist import split


def over_parts_of_arguments(
    gradient: Callable[..., Any],
    loss_fn: Callable[..., Any],
    micro_batches: int,
    batch_axes: Mapping[str, None],
    *given: Any,
) -> Any:
    """Average the results of `gradient` over micro-batches of the arguments of `loss_fn`."""
    *known, collections, (args, named) = given  # `known` begins with parameters and sinks
    bound = inspect.signature(loss_fn).bind(None, *args, **named)

    def gradient_of_part(*given: Any) -> Any:
        *others, part = given
        bound.arguments.update(part)
        return gradient(*others, (bound.args[1:], bound.kwargs))

    how = micro_batches, batch_axes, "jfp8.value_and_grad(loss_fn"
    by_name = dict(list(bound.arguments.items())[1:])
    varying = tuple(known[:2]), tuple(known), collections, by_name
    return over_micro_batches(gradient_of_part, *how, *varying)


def over_micro_batches(
    gradient: Callable[..., Any],
    micro_batches: int,
    batch_axes: Mapping[str, None],
    call: str,
    like: tuple[Any, Any],
    known: tuple[Any, ...],
    collections: Any,
    batch: Mapping[str, Any],
) -> Any:
    """Average the results of `gradient` over micro-batches, one at a time.

    Args:
      gradient: ``(*known, collections, batch) -> (grads, sinks), (loss, collections, aux)``, where
        `known` is the same for all micro-batches, and each passes `collections` to the next.
      call: the start of the user's call, for errors.
      like: arrays with the shapes of the gradients, and sinks of zeros.
    """
    call = f"{call}, micro_batches={micro_batches}"
    whole = jax.tree.leaves(without_batch_axis(batch, batch_axes, micro_batches, call))
    leaves, structure = jax.tree.flatten(batch)
    parts = {i: _split(x, micro_batches) for i, x in enumerate(leaves) if not whole[i]}

    def gradient_of_part(known: Any, varying: Any) -> Any:
        collections, part = varying
        of_part = structure.unflatten([part.get(i, leaf) for i, leaf in enumerate(leaves)])
        return gradient(*known, collections, of_part)

    # Weights are quantized here, once; the loop uses the result.
    first = jax.tree.map(lambda x: x[0], parts)
    kept, compute_rest = split(gradient_of_part, known, (collections, first))

    def accumulate(carry: Any, part: Any) -> tuple[Any, Any]:
        total, sink_so_far, collections = carry
        (grads, sink), (loss, collections, aux) = compute_rest(kept, (collections, part))
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        sink_so_far = jax.tree.map(max_of_sinks, sink_so_far, sink)
        return (total, sink_so_far, collections), (loss, aux)

    differentiated, sinks = like
    wide_zeros = lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32))
    zeros = jax.tree.map(wide_zeros, differentiated)
    (grads, sink, collections), (losses, aux) = jax.lax.scan(
        accumulate, (zeros, sinks, collections), parts, length=micro_batches
    )
    grads = jax.tree.map(lambda g: g / micro_batches, grads)
    loss = jnp.mean(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)))
    return (grads, sink), (loss, collections, aux)


def without_batch_axis(batch: Any, batch_axes: Mapping[str, None], parts: int, call: str) -> Any:
    """Return `batch` with True for every array that stays whole, False for every array to split.

    Scalars, and arrays under the names in `batch_axes`, stay whole. ``ValueError`` if the other
    arrays do not have one leading axis that `parts` divides; it suggests a `call`.
    """
    named: set[str] = set()
    sizes: dict[int, str] = {}

    def is_whole(path: jax.tree_util.KeyPath, leaf: Any) -> bool:
        spelled = jax.tree_util.keystr(path, simple=True, separator="/")
        found = batch_axes.keys() & spelled.split("/")
        named.update(found)
        shape = getattr(leaf, "shape", ())
        if not found and shape:
            sizes.setdefault(shape[0], spelled)
        return bool(found) or not shape

    whole = jax.tree_util.tree_map_with_path(is_whole, batch)
    if wrong := {k: v for k, v in batch_axes.items() if v is not None or k not in named}:
        raise ValueError(
            f"batch_axes has {wrong}, but takes None for names of arrays in the batch that have no "
            "batch axis, such as {'class_weights': None}. All others have it in front."
        )
    if len(sizes) > 1:
        listed = ", ".join(f"{spelled!r} has {size}" for size, spelled in sizes.items())
        name = sizes[min(sizes)].rpartition("/")[2]
        raise ValueError(
            f"{call[: call.index('(')]} splits every array of the batch along its leading axis, "
            f"but these differ: {listed}. Name the arrays that have no batch axis, so that they "
            f"stay whole: {call}, batch_axes={{{name!r}: None}})."
        )
    if any(size % parts for size in sizes):
        raise ValueError(
            f"{call}) splits a batch of {min(sizes)}, which is no multiple of {parts}."
        )
    return whole


def _split(leaf: Any, parts: int) -> jax.Array:
    """Split the leading axis: micro-batch `i` has every `parts`-th row from `i` on.

    So each micro-batch is sharded over all devices of the batch.
    """
    leaf = jnp.asarray(leaf)
    rows = leaf.shape[0] // parts
    sharding = explicit_sharding(leaf)
    shards = 1 if sharding is None else shards_along(sharding, leaf.ndim)[0]
    if rows % shards:
        raise ValueError(
            f"micro_batches={parts} splits a batch of {leaf.shape[0]} into parts of {rows} "
            f"examples, but explicit axes of the mesh shard it over {shards} devices: use a batch "
            f"of a multiple of {parts * shards}, or fewer micro-batches."
        )
    return leaf.reshape(rows, parts, *leaf.shape[1:]).swapaxes(0, 1)
