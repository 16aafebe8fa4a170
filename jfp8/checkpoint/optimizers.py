"""Split optimizer states into the additions of FP8 and the optimizer's own state. ::

    chain(loss_scale(), adamw)      ->  loss scale;   ScaleByAdamState
    store_state(adamw, ...)         ->  count;        ScaleByAdamState
    master_weights(adamw, ...)      ->  masters;      ScaleByAdamState
    adamw                           ->                ScaleByAdamState

`arranged` puts the parts of a saved state where the target has them. The optimizers' parts of two
states are matched in order. Chains and their empty states make no difference, so wrapping an
optimizer, or chaining it after a transformation of jfp8, keeps its moments. A state dict has no
types, so parts are recognized by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.tree import Nested, Path, at, described, put, walk
from jfp8.optim.stored_state import is_stored

_LOSS_SCALE = {"loss_scale", "growth_tracker", "grads_finite", "overflow_count"}

# The optimizer's own, or added by jfp8. A count belongs to a wrapper that draws random bits.
Kind = Literal["own", "loss scale", "masters", "count"]


@dataclass(frozen=True)
class _Part:
    """One part of an optimizer state, at a path, with its fields but for a state that it wraps."""

    kind: Kind
    path: Path
    fields: Any


def arranged(target: Any, saved: Any, path: Path, params: Any, log: Log) -> Any:
    """Arrange the state `saved` like the state `target`, which is at `path` of the target.

    Both are nested dicts, {} for none. Masters start from the saved `params` if there are none.
    """
    if not (_is_composed(target) or _is_composed(saved)):
        if not (isinstance(target, dict) and isinstance(saved, dict)):
            return saved
        each = lambda name: arranged(target.get(name, {}), saved[name], (*path, name), {}, log)
        return {name: each(name) for name in saved}
    wanted, given = _parts(target, ()), _parts(saved, ())
    own = [_of_kinds(side, "own") for side in (wanted, given)]
    if len(own[0]) != len(own[1]):
        spelled = [", ".join(described(p.fields) for p in side) or "nothing" for side in own]
        log.problem(path, f"the target has {spelled[0]}; the checkpoint {spelled[1]}")
        return target
    new: Nested = {}
    for part, theirs in zip(*own, strict=True):
        fields = arranged(part.fields, theirs.fields, (*path, *part.path), {}, log)
        new = put(new, part.path, fields)
    for place, value in _fp8_parts(wanted, given, path, params, log):
        new = put(new, place, value)
    if masters(saved) and not masters(target):
        log.change("Masters of parameters are not kept any more", path)
    return new


def _fp8_parts(
    wanted: list[_Part], given: list[_Part], path: Path, params: Any, log: Log
) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of the parts that jfp8 adds, and their places in the target's state."""
    scales = iter(_of_kinds(given, "loss scale"))
    counts = iter(_of_kinds(given, "count", "masters"))
    saved = next((p.fields["masters"] for p in _of_kinds(given, "masters")), {})
    for part in _of_kinds(wanted, "loss scale", "count", "masters"):
        place = (*path, *part.path)
        if part.kind == "loss scale":
            fields = _loss_scale(part, next(scales, None), place, log)
        else:  # any count is valid, but none may be used twice
            theirs = next(counts, None)
            fields = {"count": theirs.fields["count"] if theirs else np.zeros((), np.uint32)}
        if part.kind == "masters":
            target = part.fields["masters"]
            fields["masters"] = _masters(target, saved, params, (*place, "masters"), log)
        yield from (((*part.path, name), value) for name, value in fields.items())
    for part in scales:
        log.change("A loss scale is dropped", (*path, *part.path))


def _loss_scale(part: _Part, saved: _Part | None, path: Path, log: Log) -> Nested:
    if saved is not None:
        return saved.fields
    log.change("A loss scale begins, as the target has it", path)
    is_value = lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct)
    return {name: leaf for name, leaf in part.fields.items() if is_value(leaf)}


def _masters(target: Nested, saved: Any, params: Any, path: Path, log: Log) -> Nested:
    new: Nested = {}
    for place, _ in walk(target):
        master = at(saved, place)
        if master is None:
            master = at(params, place)
            log.change("Masters start from the parameters as they were saved", (*path, *place))
        new = put(new, place, master)
    return new


def unmastered(target: Any, params: Any, before: Any, after: Any, path: Path, log: Log) -> Any:
    """Return the saved `params`, or their masters if the target stores params in 16 or 32 bits.

    Masters come from the saved optimizer state `before`. Masters that `after`, the state of the
    target, also has stay masters.
    """
    saved, kept = masters(before), masters(after)
    for place, leaf in walk(target):
        master = at(saved, place)
        if master is None or is_stored(leaf) or at(kept, place) is not None:
            continue
        if at(params, place) is not None:
            log.change("Parameters are taken from their masters", (*path, *place))
            params = put(params, place, master)
    return params


def rescaled(fp8: Any, before: Any, after: Any, afresh: bool, path: Path, log: Log) -> Any:
    """Rescale the histories of gradients in `fp8` by the loss scale, which multiplies gradients.

    The checkpoint's loss scale is in the optimizer state `before`, and unknown if `afresh`; the
    target's in `after`.
    """
    old, new = _loss_scales(before), _loss_scales(after)
    if afresh and new:
        factor, what = 0.0, "start empty: their loss scale is not known"
    elif bool(old) == bool(new):
        return fp8
    else:
        factor, what = _number(new) / _number(old), "follow the loss scale"
    if factor == 1.0:
        return fp8
    for product in histories.product_paths(fp8):
        for place, leaf in walk(at(fp8, product)["grad"], (*product, "grad")):
            history = np.asarray(leaf, np.float32)
            if np.any(history):
                log.change(f"Amax histories of gradients {what}", (*path, *place[:-1]))
            largest = np.finfo(np.float32).max / max(factor, 1.0)
            followed = np.minimum(history, largest) * np.float32(factor)
            followed = np.where(np.isfinite(history), followed, history)
            fp8 = put(fp8, place, followed if factor else np.zeros_like(history))
    return fp8


def masters(state: Any) -> Nested:
    """Return the masters in an optimizer state, a tree like the parameters; {} without masters."""
    if not isinstance(state, dict):
        return {}
    if _kind(state) == "masters":
        return state["masters"] if isinstance(state["masters"], dict) else {}
    return next(filter(None, map(masters, state.values())), {})


def _loss_scales(state: Any) -> list[Any]:
    if not isinstance(state, dict):
        return []
    here = [state["loss_scale"]] if set(state) >= _LOSS_SCALE else []
    return [*here, *(x for child in state.values() for x in _loss_scales(child))]


def _number(loss_scales: list[Any]) -> float:
    """Return the value of a loss scale; 1 without one, or if it is invalid."""
    for scale in loss_scales:
        if not isinstance(scale, jax.ShapeDtypeStruct) and np.shape(scale) == ():
            value = float(np.asarray(scale, np.float32))
            return value if np.isfinite(value) and value > 0 else 1.0
    return 1.0


def _parts(state: Any, path: Path) -> list[_Part]:
    """Return the parts of `state`, nested dicts, in the order of their use."""
    if not isinstance(state, dict):
        return [_Part("own", path, state)]
    if all(name.isdigit() for name in state):
        return [part for i in sorted(state, key=int) for part in _parts(state[i], (*path, i))]
    kind = _kind(state)
    if kind == "own":
        return [_Part("own", path, state)]
    fields = dict(state)
    inner = _parts(fields.pop("inner_state", {}), (*path, "inner_state"))
    return [_Part(kind, path, fields), *inner]


def _of_kinds(found: list[_Part], *kinds: Kind) -> list[_Part]:
    return [part for part in found if part.kind in kinds]


def _is_composed(state: Any) -> bool:
    if not isinstance(state, dict) or not state:
        return False
    return all(name.isdigit() for name in state) or _kind(state) != "own"


def _kind(state: Nested) -> Kind:
    names = set(state)
    if _LOSS_SCALE <= names <= _LOSS_SCALE | {"inner_state"}:
        return "loss scale"
    if {"count", "masters"} <= names <= {"count", "masters", "inner_state"}:
        return "masters"
    # Optax counts in int32.
    count = state.get("count")
    if names <= {"count", "inner_state"} and getattr(count, "dtype", None) == np.uint32:
        return "count"
    return "own"
