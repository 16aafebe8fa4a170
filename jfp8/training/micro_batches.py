"""Micro-batches: which arrays of a batch are split, and a loop over their parts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.scaling.sink import max_of_sinks
from jfp8.training.histories import Collections
from jfp8.training.hoist import split


def over_micro_batches(
    gradient: Callable[..., Any],
    micro_batches: int,
    whole: list[bool],
    differentiated: Any,
    sinks: Collections,
    fp8: Collections,
    collections: Collections,
    batch: Any,
) -> Any:
    """Average the results of `gradient` over parts of the batch, taken one by one."""
    leaves, structure = jax.tree.flatten(batch)
    parts = {
        i: _split(leaves[i], micro_batches) for i, is_whole in enumerate(whole) if not is_whole
    }

    def gradient_of_part(known: Any, varying: Any) -> Any:
        collections, part = varying
        batch = structure.unflatten([part.get(i, leaf) for i, leaf in enumerate(leaves)])
        return gradient(*known, collections, batch)

    # Weights are quantized here, once; the loop uses what is kept.
    kept, compute_rest = split(
        gradient_of_part,
        (differentiated, sinks, fp8),
        (collections, jax.tree.map(lambda x: x[0], parts)),
    )

    def accumulate(carry: Any, part: Any) -> tuple[Any, Any]:
        total, sink_so_far, collections = carry
        (grads, sink), (loss, collections, aux) = compute_rest(kept, (collections, part))
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        sink_so_far = jax.tree.map(max_of_sinks, sink_so_far, sink)
        return (total, sink_so_far, collections), (loss, aux)

    zeros = jax.tree.map(
        lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), differentiated
    )
    carry = (zeros, sinks, collections)
    (grads, sink, collections), (losses, aux) = jax.lax.scan(
        accumulate, carry, parts, length=micro_batches
    )
    grads = jax.tree.map(lambda g: g / micro_batches, grads)
    loss = jnp.mean(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)))
    return (grads, sink), (loss, collections, aux)


def without_batch_axis(batch: Any, batch_axes: Mapping[str, None], call: str) -> Any:
    """Return `batch` with True for every array that stays whole, False for one that is cut.

    Args:
      batch: pytree of arrays. Scalars stay whole.
      batch_axes: names, of keys or attributes in `batch`, whose arrays stay whole.
      call: the beginning of the call to write, for errors.

    Raises:
      ValueError: a name that is not in `batch`; the other arrays differ in their leading axes.
    """
    if wrong := [f"{name!r}: {axis!r}" for name, axis in batch_axes.items() if axis is not None]:
        raise ValueError(
            f"batch_axes={{{', '.join(wrong)}}}: it names arrays without a batch axis, "
            "batch_axes={'class_weights': None}. All others have it in front."
        )
    named: set[str] = set()
    sizes: dict[int, str] = {}

    def is_whole(path: jax.tree_util.KeyPath, leaf: Any) -> bool:
        spelled = jax.tree_util.keystr(path, simple=True, separator="/")
        found = batch_axes.keys() & spelled.split("/")
        named.update(found)
        if not found and jnp.ndim(leaf):
            sizes.setdefault(jnp.shape(leaf)[0], spelled)
        return bool(found) or not jnp.ndim(leaf)

    whole = jax.tree_util.tree_map_with_path(is_whole, batch)
    if unknown := sorted(batch_axes.keys() - named):
        raise ValueError(f"batch_axes names {unknown}, which the batch does not have.")
    if len(sizes) > 1:
        listed = ", ".join(f"{spelled!r} has {size}" for size, spelled in sizes.items())
        name = sizes[min(sizes)].rpartition("/")[2]
        raise ValueError(
            f"{call[: call.index('(')]} splits every array of the batch along its leading axis, "
            f"but these differ: {listed}. Name the arrays that have no batch axis, so that they "
            f"stay whole: {call}, batch_axes={{{name!r}: None}})."
        )
    return whole


def whole_arrays(
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    micro_batches: int,
    batch_axes: Mapping[str, None],
) -> list[bool]:
    """Return True for every array of a batch that all micro-batches get, False for one to split."""
    names = [str(i) for i in range(len(args))]
    with contextlib.suppress(TypeError, ValueError):  # not every callable has a signature
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(inspect.signature(loss_fn).parameters.values())[1:]
        given = [p.name for p in parameters if p.kind in positional]
        names[: len(given)] = given[: len(args)]
    call = f"jfp8.value_and_grad(loss_fn, micro_batches={micro_batches}"
    whole = without_batch_axis({**dict(zip(names, args, strict=True)), **named}, batch_axes, call)
    return jax.tree.leaves(([whole[name] for name in names], {name: whole[name] for name in named}))


def _split(leaf: Any, parts: int) -> jax.Array:
    """Split the leading axis: part `i` has every `parts`-th row from `i` on.

    So each part is spread over all devices that the batch is sharded over.
    """
    leaf = jnp.asarray(leaf)
    if leaf.shape[0] % parts:
        raise ValueError(
            f"micro_batches={parts} must divide the leading axis of every array of the batch, "
            f"but one has shape {leaf.shape}."
        )
    rows = leaf.shape[0] // parts
    try:
        return leaf.reshape(rows, parts, *leaf.shape[1:]).swapaxes(0, 1)
    except Exception as error:
        error.add_note(
            f"micro_batches={parts} makes parts of {rows} examples. Over explicit axes the number "
            "of devices that the batch is sharded over must divide that number."
        )
        raise
