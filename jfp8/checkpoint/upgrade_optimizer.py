"""Optimizer states of a checkpoint, made to fit those of a target, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.optimizer_state import Part, is_composed, loss_scales, masters, parts
from jfp8.checkpoint.tree import Nested, Path, at, described, put, walk
from jfp8.checkpoint.values import Leaves, placed
from jfp8.optim.stored_state import is_stored


@dataclass(frozen=True)
class Parameters:
    """What an optimizer state is about.

    Attributes:
      params: the saved parameters, nested dicts; {} where they do not matter.
      masters: the saved masters, nested dicts of the same names; {} without.
    """

    params: Any = field(default_factory=dict)
    masters: Nested = field(default_factory=dict)


def fit_optimizer(
    target: Any, saved: Any, path: Path, parameters: Parameters, leaves: Leaves
) -> None:
    """Make the leaves of an optimizer state, or of a part of one; {} where there is none."""
    if is_composed(target) or is_composed(saved):
        _fit_parts(target, saved, path, parameters, leaves)
    elif not isinstance(target, dict):
        leaves.fit(target, saved, path)
    elif isinstance(saved, dict):
        for name in {**target, **saved}:
            inner = target.get(name, {}), saved.get(name, {})
            fit_optimizer(*inner, (*path, name), parameters, leaves)
    else:
        given = described(saved)
        leaves.log.problem(path, f"the target has {described(target)}, the checkpoint {given}")


def _fit_parts(target: Any, saved: Any, path: Path, parameters: Parameters, leaves: Leaves) -> None:
    """An optimizer state that is put together of several."""
    wanted, given = parts(target, path), parts(saved, path)
    own = [_of_kinds(side, "own") for side in (wanted, given)]
    if len(own[0]) != len(own[1]):
        spelled = [", ".join(described(p.fields) for p in side) or "nothing" for side in own]
        leaves.log.problem(path, f"the target has {spelled[0]}; the checkpoint {spelled[1]}")
        return
    for part, theirs in zip(*own, strict=True):
        fit_optimizer(part.fields, theirs.fields, part.path, parameters, leaves)
    scales = iter(_of_kinds(given, "loss scale"))
    counts = iter(_of_kinds(given, "count", "masters"))
    for part in wanted:
        if part.kind == "loss scale":
            _fit_loss_scale(part, next(scales, None), leaves)
        elif part.kind in ("count", "masters"):
            _fit_count(part, next(counts, None), leaves)
        if part.kind == "masters":
            _fit_masters(part, parameters, leaves)
    for part in scales:
        leaves.log.change("A loss scale is dropped", part.path)
    if masters(saved) and not masters(target):
        leaves.log.change("Masters of parameters are not kept any more", path)


def _of_kinds(found: list[Part], *kinds: str) -> list[Part]:
    return [part for part in found if part.kind in kinds]


def _fit_loss_scale(part: Part, saved: Part | None, leaves: Leaves) -> None:
    if saved is None:
        leaves.log.change("A loss scale begins, as the target has it", part.path)
    for name, leaf in part.fields.items():
        place = (*part.path, name)
        if saved is not None:
            leaves.fit(leaf, saved.fields.get(name), place)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            leaves.log.problem(place, "is missing, and the target has a shape but no value")
        else:
            leaves.new[place] = leaf


def _fit_count(part: Part, saved: Part | None, leaves: Leaves) -> None:
    """The number of steps from which random bits follow: any will do, but not one twice."""
    count, place = part.fields["count"], (*part.path, "count")
    if saved is None:
        leaves.zeros(count, place)
    else:
        leaves.fit(count, saved.fields.get("count"), place)


def _fit_masters(part: Part, parameters: Parameters, leaves: Leaves) -> None:
    for place, leaf in walk(part.fields["masters"]):
        path = (*part.path, "masters", *place)
        master = at(parameters.masters, place)
        if master is None:
            master = at(parameters.params, place)
            leaves.log.change("Masters start from the parameters as they were saved", path)
        leaves.fit(leaf, master, path)


def unmastered(target: Any, saved: Parameters, kept: Nested, path: Path, log: Log) -> Any:
    """The saved parameters, or their masters where the target has them in 16 or 32 bits.

    Masters that the target has as such, in `kept`, stay masters.
    """
    params = saved.params
    for place, leaf in walk(target):
        master = at(saved.masters, place)
        if master is None or is_stored(leaf) or at(kept, place) is not None:
            continue
        if at(params, place) is not None:
            log.change("Parameters are taken from their masters", (*path, *place))
            params = put(params, place, master)
    return params


def follow_loss_scale(
    fp8: Any, path: Path, before: Any, after: Any, afresh: bool, leaves: Leaves
) -> None:
    """Gradients carry the loss scale, and so do their histories in `fp8`: make them follow it.

    That of the checkpoint is in the optimizer state `before`, and not known if `afresh`.
    """
    old, new = loss_scales(before), loss_scales(after)
    if afresh and new:
        factor, what = 0.0, "start empty: their loss scale is not known"
    elif bool(old) == bool(new):
        return
    else:
        factor, what = _number(new) / _number(old), "follow the loss scale"
    if factor == 1.0:
        return
    for product in histories.product_paths(fp8):
        grad = at(fp8, product)["grad"]
        for place, leaf in walk(grad, (*path, *product, "grad")):
            history = np.asarray(leaves.new.get(place, 0.0))
            if np.any(history):
                leaves.log.change(f"Amax histories of gradients {what}", place[:-1])
            followed = np.minimum(history * np.float32(factor), np.finfo(np.float32).max)
            leaves.new[place] = placed(followed, leaf)


def _number(loss_scales: list[Any]) -> float:
    """The value of a loss scale; 1 without one, or where there is no use for it."""
    for scale in loss_scales:
        if not isinstance(scale, jax.ShapeDtypeStruct) and np.shape(scale) == ():
            value = float(np.asarray(scale, np.float32))
            return value if np.isfinite(value) and value > 0 else 1.0
    return 1.0
