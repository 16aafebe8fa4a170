"""Merge the measurements of each layer, and keep stacked layers apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jfp8.debug.reading import Place
from jfp8.tracing.notes import notes_of, product_path


def by_layer(
    places: Sequence[Place], vectors: Sequence[jax.Array]
) -> Iterator[tuple[Place, tuple[int, ...], np.ndarray]]:
    """Yield place, index among stacked layers, and measurement ``f64[W]``, in program order.

    Several uses of a layer, and iterations of loops, become one. Iterations of a loop over stacked
    layers stay apart: the index counts them. `vectors` are ``f32[*loops, W]`` for each of `places`.
    """
    on_host = [np.asarray(x, np.float64) for x in jax.device_get(vectors)]
    stacked = _stacked_loops(places)
    found: dict[tuple[Any, ...], tuple[Place, np.ndarray]] = {}
    for place, vector in zip(places, on_host, strict=True):
        if _is_computed_again(place):
            continue
        notes = notes_of(place.stack)
        path = product_path(notes)
        vector = _without_other_loops(vector, place, stacked.get(path, ()))
        key = (path or place.number, notes.get("recipe"), place.measure, vector.shape)
        if key in found:
            place, before = found[key]
            vector = place.measure.merged(np.stack([before, vector]), np)
        found[key] = (place, vector)
    for place, vector in found.values():
        for index in np.ndindex(vector.shape[:-1]):
            yield place, index, vector[index]


def _is_computed_again(place: Place) -> bool:
    """Recognize a part of the forward pass that the backward pass repeats."""
    again = "transpose(" in place.stack or "rematted_computation" in place.stack
    return again and place.measure.forward


def _stacked_loops(places: Sequence[Place]) -> dict[str, tuple[int, ...]]:
    """Return, for each path, the lengths of the loops over its layers, whose weights differ."""
    found: dict[str, tuple[int, ...]] = {}
    for place in places:
        if place.measure.weight is not None and not _is_computed_again(place):
            path = product_path(notes_of(place.stack))
            found.setdefault(path, tuple(loop.length for loop in place.loops if loop.over_inputs))
    return found


def _without_other_loops(vector: np.ndarray, place: Place, layers: tuple[int, ...]) -> np.ndarray:
    """Merge `vector` along all loops but those over layers, the innermost of each length."""
    wanted = list(layers)
    for axis in reversed(range(len(place.loops))):  # axes in front keep their places
        if wanted and place.loops[axis].length == wanted[-1]:
            wanted.pop()
        else:
            vector = place.measure.merged(np.moveaxis(vector, axis, 0), np)
    return vector
