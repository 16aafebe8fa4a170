"""Optimizer states, taken apart into what FP8 adds to them and what is the optimizer's own. ::

    chain(loss_scale(), adamw)      ->  loss scale;   ScaleByAdamState
    store_state(adamw, ...)         ->  count;        ScaleByAdamState
    master_weights(adamw, ...)      ->  masters;      ScaleByAdamState
    adamw                           ->                ScaleByAdamState

The own parts of two states are compared one by one, in order. Chains and their empty states make
no difference, so wrapping an optimizer, or putting a transformation of jfp8 in front of it, keeps
its moments. A state dict has no types, so parts are recognised by the names of their fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jfp8.checkpoint.tree import Nested, Path

LOSS_SCALE = ("loss_scale", "growth_tracker", "grads_finite", "overflow_count")

Kind = Literal["own", "loss scale", "masters", "count"]


@dataclass(frozen=True)
class Part:
    """One part of an optimizer state.

    Attributes:
      kind: ``"own"`` for the optimizer's; else which part of jfp8 it is. A ``"count"`` belongs to a
        wrapper that draws random bits.
      path: where it is.
      fields: what it has there, without what is wrapped.
    """

    kind: Kind
    path: Path
    fields: Any


def parts(state: Any, path: Path) -> list[Part]:
    """The parts of `state`, nested dicts that stand at `path`, in the order of their use."""
    if not isinstance(state, dict):
        return [Part("own", path, state)]
    if all(name.isdigit() for name in state):
        return [part for i in sorted(state, key=int) for part in parts(state[i], (*path, i))]
    kind = _kind(state)
    if kind == "own":
        return [Part("own", path, state)]
    fields = dict(state)
    inner = parts(fields.pop("inner_state", {}), (*path, "inner_state"))
    return [Part(kind, path, fields), *inner]


def is_composed(state: Any) -> bool:
    """Whether `parts` takes `state` apart at all."""
    if not isinstance(state, dict):
        return False
    return all(name.isdigit() for name in state) or _kind(state) != "own"


def loss_scales(state: Any) -> list[Any]:
    """The loss scales in an optimizer state."""
    if not isinstance(state, dict):
        return []
    here = [state["loss_scale"]] if set(LOSS_SCALE) <= set(state) else []
    return [*here, *(x for child in state.values() for x in loss_scales(child))]


def masters(state: Any) -> Nested:
    """The masters in an optimizer state, a tree like that of the parameters; empty without."""
    if not isinstance(state, dict):
        return {}
    if _kind(state) == "masters":
        return state["masters"] if isinstance(state["masters"], dict) else {}
    for child in state.values():
        if found := masters(child):
            return found
    return {}


def _kind(state: Nested) -> Kind:
    names = set(state)
    if set(LOSS_SCALE) <= names <= {*LOSS_SCALE, "inner_state"}:
        return "loss scale"
    if {"count", "masters"} <= names <= {"count", "masters", "inner_state"}:
        return "masters"
    # optax counts in int32.
    count = state.get("count")
    if names <= {"count", "inner_state"} and getattr(count, "dtype", None) == np.uint32:
        return "count"
    return "own"
