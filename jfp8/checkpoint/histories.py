"""Convert amax histories of a checkpoint to fit a target.

A matmul stores the histories of its three tensors, newest first, with zeros for empty slots. ::

    Linen  {"lhs", "rhs", "grad"}: {"amax_history": f32[..., H], "amax": f32[...]}
    NNX    {"lhs", "rhs", "grad"}: f32[..., H]

Next to them is their `fingerprint`, ``"check"``, f32[...] or, in NNX, f32[..., 1]; older
checkpoints lack it. They are recognized by this structure, whatever the layers are called.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.state_dict import Path, walk
from jfp8.checkpoint.tree import Nested, at, described, put
from jfp8.checkpoint.values import placed
from jfp8.layers.linen.state_in_gradients import NAME, histories_in
from jfp8.scaling.history import CHECK, fingerprint
from jfp8.scaling.printing import natural
from jfp8.scaling.sink import ROLES, WIDTH

Tensors: TypeAlias = dict[str, np.ndarray]
"""The histories of one matmul: ``{"lhs", "rhs", "grad"}: f32[..., H]``, newest first."""

HISTORY, RUNNING = "amax_history", "amax"

_FLAX_ROLES = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
_FLAX_NAMES = {f"{x}_{y}" for x in _FLAX_ROLES.values() for y in (HISTORY, "scale")}

MISSING = "Amax histories that the checkpoint lacks start empty (current scaling until they fill)"
DROPPED = (
    "Amax histories that the target has no place for are dropped (to keep them, restore into a "
    "model with the recipe that was saved)"
)
RESTARTED = "Amax histories of another structure start empty (current scaling until they fill)"
UNMATCHED = "Amax histories of products that the target does not have are dropped"
CLEANED = "Entries of amax histories that are no amax (NaN, Inf, negative) are left out"


def is_product(node: Any) -> bool:
    """Return True if `node` holds the histories of one matmul."""
    if not isinstance(node, dict) or set(node) - {CHECK} != set(ROLES):
        return False
    tensors = [node[role] for role in ROLES]
    if CHECK in node and not _is_float(node[CHECK]):
        return False
    return all(map(_is_state, tensors)) or all(map(_is_history, tensors))


def is_sink(node: Any) -> bool:
    """Return True if `node` is the sink of one matmul: zeros, which a checkpoint does not need."""
    if not isinstance(node, dict) or set(node) != {"amax"}:
        return False
    return getattr(node["amax"], "shape", ())[-2:] == (len(ROLES), WIDTH)


def fitted(target: Any, saved: Any, path: Path, log: Log) -> dict[Path, Any]:
    """Return the histories of one matmul, in the form of `target`, by their paths.

    `saved` is the entry of the checkpoint in its place: a matmul, None, or anything else.
    """
    leaves = dict(walk(target, path))
    new = {place: np.zeros(leaf.shape, np.float32) for place, leaf in leaves.items()}
    stack = lambda node: [_history(node[role]).shape[:-1] for role in ROLES]
    form = lambda node: {place: (leaf.shape, leaf.dtype) for place, leaf in walk(node)}
    if not is_product(saved) or stack(saved) != stack(target):
        log.change(MISSING if saved is None else RESTARTED, path)
    elif form(saved) == form(target) and all(_is_clean(_history(saved[role])) for role in ROLES):
        new = dict(walk(saved, path))  # The check too, right or not.
    else:
        states = {role: _state(target[role], saved[role], (*path, role), log) for role in ROLES}
        new |= dict(walk(states, path))
        if CHECK in target:
            new[*path, CHECK] = np.reshape(fingerprint(states), target[CHECK].shape)
    return {place: placed(array, leaves[place]) for place, array in new.items()}


def _state(target: Any, saved: Any, place: Path, log: Log) -> Any:
    """Return the history of one tensor: the newest entries, and empty slots in a longer one."""
    history, length = np.asarray(_history(saved), np.float32), _history(target).shape[-1]
    if not _is_clean(history):
        log.change(CLEANED, place)
        history = newest_first(history)
    given = history.shape[-1]
    if given > length:
        log.change(f"Amax histories keep the newest {length} of {given} entries", place)
    elif given < length:
        log.change(f"Amax histories of {given} entries get room for {length}", place)
    padding = [(0, 0)] * (history.ndim - 1) + [(0, max(length - given, 0))]
    history = np.pad(history[..., :length], padding)
    if not isinstance(target, dict):
        return history
    running = saved[RUNNING] if isinstance(saved, dict) else np.zeros(history.shape[:-1])
    return {HISTORY: history, RUNNING: _possible(running)}


def _is_clean(history: Any) -> bool:
    return bool(np.all(np.isfinite(history) & (np.asarray(history) >= 0)))


def without_gradients(state: Any, log: Log) -> Any:
    """Empty the histories of gradients in nested dicts: their loss scale is not known."""
    for product in product_paths(state):
        for place, history in walk(at(state, product)["grad"], (*product, "grad")):
            if np.any(np.asarray(history)):
                what = "Amax histories of gradients start empty: their loss scale is not known"
                log.change(what, place[:-1])
            state = put(state, place, np.zeros_like(history))
    return state


def newest_first(history: np.ndarray) -> np.ndarray:
    """Move empty slots and invalid amaxes, as zeros, to the end of `history`."""
    kept = _possible(history)
    order = np.argsort(kept == 0, axis=-1, kind="stable")
    return np.take_along_axis(kept, order, axis=-1)


def unrolled(ring: np.ndarray) -> np.ndarray:
    """Return a history of Flax or Transformer Engine, f32[..., H], newest first.

    They roll by -1 and then write slot 0. So slot 1 is the oldest.
    """
    ring = np.asarray(ring, np.float32)
    return newest_first(np.concatenate([ring[..., :1], ring[..., :0:-1]], axis=-1))


def are_alike(tensors: dict[str, Any]) -> bool:
    """Return True if these are histories of one shape, as for one matmul."""
    shapes = {getattr(leaf, "shape", None) for leaf in tensors.values()}
    return all(map(_is_history, tensors.values())) and len(shapes) == 1


def renamed(found: dict[Path, Tensors], target: Any, path: Path, log: Log) -> Nested:
    """Arrange histories of another library like the ``fp8`` collection `target`.

    Matmuls have other names there. The matmuls of a module are matched, in the order of the names,
    with the matmuls of the same module in the target, or else of its submodules. `found` maps
    the path of their module in the other library, and a name, to the histories.
    """
    order = lambda path: tuple(map(natural, path))
    ours = sorted(product_paths(target), key=order)
    theirs: dict[Path, list[Path]] = {}
    for place in sorted(found, key=order):
        theirs.setdefault(place[:-1], []).append(place)
    fp8: Nested = {}
    for module, products in theirs.items():
        places = [p for p in ours if p[:-1] == module]
        if len(places) != len(products):
            places = [p for p in ours if p[: len(module)] == module]
        if len(places) != len(products):
            for product in products:
                log.change(UNMATCHED, (*path, *product))
            continue
        for place, product in zip(places, products, strict=True):
            fp8 = put(fp8, place, found[product])
    return fp8


def as_fp8(collection: Any, target: Any, path: Path, log: Log) -> Nested:
    """Convert Flax's `collection`, at `path`, to the layout of ``fp8`` in the nested `target`."""
    found: dict[Path, Tensors] = {}
    is_state = lambda node: set(node) >= _FLAX_NAMES or set(node) == {NAME}
    for place, node in walk(collection, path, is_state):
        product = place[len(path) :]
        if not isinstance(node, dict):
            log.problem(place, f"{described(node)}, which is no state of Flax's FP8 layers")
        elif NAME in node:  # A jfp8 model with this `state_collection`
            tensors = histories_in(node)
            found[product] = {role: np.asarray(tensors[role][HISTORY]) for role in ROLES}
        else:
            rings = {role: node[f"{name}_amax_history"] for role, name in _FLAX_ROLES.items()}
            if are_alike(rings):
                found[product] = {role: unrolled(ring) for role, ring in rings.items()}
            else:
                shapes = ", ".join(map(described, rings.values()))
                log.problem(place, f"histories are {shapes}, not f32 arrays of one shape")
    return renamed(found, target.get("fp8", {}), path, log)


def product_paths(fp8: Any) -> list[Path]:
    """Return the paths of the histories of each matmul in nested dicts."""
    return [path for path, node in walk(fp8, until=is_product) if is_product(node)]


def _possible(amaxes: Any) -> np.ndarray:
    amaxes = np.asarray(amaxes, np.float32)
    return np.where(np.isfinite(amaxes) & (amaxes > 0), amaxes, np.float32(0.0))


def _history(tensor: Any) -> Any:
    return tensor[HISTORY] if isinstance(tensor, dict) else tensor


def _is_state(tensor: Any) -> bool:
    if not isinstance(tensor, dict) or set(tensor) != {HISTORY, RUNNING}:
        return False
    history, running = tensor[HISTORY], tensor[RUNNING]
    return _is_history(history) and _is_float(running) and running.shape == history.shape[:-1]


def _is_history(leaf: Any) -> bool:
    return _is_float(leaf) and bool(leaf.shape)


def _is_float(leaf: Any) -> bool:
    kinds = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct
    return isinstance(leaf, kinds) and jnp.issubdtype(leaf.dtype, jnp.floating)
