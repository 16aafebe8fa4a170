"""Evaluate a traced program with taps in it, and merge the measurements at the taps by layer.

Measurements leave a ``scan`` stacked along a new leading axis, one for each iteration; those of a
``while`` are merged, because their number is not known. ``vmap`` and devices are merged as well. A
branch that is not taken measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jfp8.debug.measurement import Measurement
from jfp8.products.observers import TAP
from jfp8.tracing import interpreter
from jfp8.tracing.compat import jaxprs_of, primitive_name
from jfp8.tracing.interpreter import Computed, Reader, Value, arrays, equations, notes_in
from jfp8.tracing.notes import notes_of, product_path

# Loops that a value is computed from: ``(path of a scan, whether it carries the value)``.
Origins = frozenset[tuple[tuple[int, ...], bool]]


@dataclass(frozen=True)
class Loop:
    """A ``scan`` around a tap."""

    length: int
    # The tapped weight is computed from what the loop runs over, and from nothing that it carries:
    # then it belongs to another layer in each iteration.
    over_inputs: bool


@dataclass(frozen=True)
class Tap:
    """A tap in a program: what it measures, and where."""

    measure: Measurement
    stack: str  # named scopes around it, with the notes for `jfp8.report`
    number: int  # counts taps in the order of the program
    loops: tuple[Loop, ...]  # around it, outermost first: leading axes of the measurement
    origins: Origins  # the tapped weight's, if there is one; empty in what `read` returns

    @property
    def path(self) -> str:
        """Return the path of the layer, and of the matmul in it."""
        return product_path(notes_of(self.stack))

    @property
    def recipe(self) -> str:
        """Return the name of the recipe, or ""."""
        return notes_of(self.stack).get("recipe", "")

    @property
    def is_repeated(self) -> bool:
        """Recognize a part of the forward pass that the backward pass computes again."""
        again = "transpose(" in self.stack or "rematted_computation" in self.stack
        return again and self.measure.forward


Found = list[tuple[Tap, jax.Array]]


def read(closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Found]:
    """Return the results of a program, and ``f32[*loops, W]`` measured at each of its taps."""
    reader = _Taps()
    ins = [Value(x, reader.constant(x)) for x in arguments]
    outs, found = interpreter.run(reader, closed.jaxpr, closed.consts, ins)
    numbered = [
        (replace(tap, number=i, origins=frozenset()), vector)
        for i, (tap, vector) in enumerate(found)
    ]
    return arrays(outs), numbered


def _has_taps(eqn: Any) -> bool:
    inside = (inner for jaxpr in jaxprs_of(eqn) for inner, _, _ in equations(jaxpr))
    return any(inner.primitive is TAP for inner in inside)


class _Taps(Reader):
    """Emit what is measured at taps, by `Tap`. Results may depend on all operands."""

    emits = True
    inlines_rules = True

    def enters(self, eqn: Any, ins: Sequence[Value]) -> bool:
        return _has_taps(eqn)

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Computed:
        if eqn.primitive is not TAP:
            return None
        vector_of = measure = eqn.params["measure"]
        batched = eqn.params["batched"]
        for _ in range(batched):
            vector_of = jax.vmap(vector_of)
        vector = vector_of(*arrays(ins))
        for _ in range(batched):
            vector = measure.merged(vector)
        origins = frozenset() if measure.weight is None else ins[measure.weight].note
        return ins[:1], [(Tap(measure, at.stack, 0, (), origins), vector)]

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: Any) -> Sequence[Value]:
        raise NotImplementedError(
            f"Statistics of products inside {primitive_name(eqn)!r} cannot be taken out of it. "
            "Call jfp8.debug.stats on a function without it."
        )

    def constant(self, x: Any) -> Origins:
        return frozenset()

    def flow(self, eqn: Any, ins: Sequence[Value]) -> list[Origins]:
        return [frozenset().union(*notes_in(ins))] * len(eqn.outvars)

    def in_loop(self, eqn: Any, notes: list[Any], at: Any, n_fixed: int, n: int) -> list[Origins]:
        """Note that carried values may depend on everything, and mark slices."""
        carried = frozenset({(at.path, True)}).union(*notes)
        slices = [origins | {(at.path, False)} for origins in notes[n:]]
        return [*notes[:n_fixed], *[carried] * (n - n_fixed), *slices]

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> list[Origins]:
        return [frozenset().union(*inside)] * len(eqn.outvars)

    def leave_scan(self, key: Tap, x: Any, eqn: Any, at: Any) -> tuple[Tap, Any]:
        over_inputs = (at.path, False) in key.origins and (at.path, True) not in key.origins
        loops = (Loop(eqn.params["length"], over_inputs), *key.loops)
        return replace(key, loops=loops), x

    def merge(self, key: Tap, stacked: Any) -> jax.Array:
        return key.measure.merged(stacked)

    def nothing(self, key: Tap, like: Any) -> jax.Array:
        return jnp.broadcast_to(key.measure.nothing(), like.shape)

    def merge_devices(self, key: Tap, x: Any, axes: tuple[Any, ...]) -> jax.Array:
        return key.measure.merged_over_devices(x, axes)


def by_layer(
    taps: Sequence[Tap], vectors: Sequence[jax.Array]
) -> Iterator[tuple[Tap, tuple[int, ...], np.ndarray]]:
    """Yield tap, index among stacked layers, and measurement ``f64[W]``, in program order.

    Several uses of a layer, and iterations of loops, become one. Iterations of a loop over stacked
    layers stay apart: the index counts them. `vectors` are ``f32[*loops, W]`` for each of `taps`.
    """
    on_host = [np.asarray(x, np.float64) for x in jax.device_get(vectors)]
    measured = [pair for pair in zip(taps, on_host, strict=True) if not pair[0].is_repeated]
    # The lengths of the loops over a layer's weights, which differ, by its path.
    stacked: dict[str, list[int]] = {}
    for tap, _ in measured:
        if tap.measure.weight is not None:
            lengths = [loop.length for loop in tap.loops if loop.over_inputs]
            stacked.setdefault(tap.path, lengths)
    found: dict[tuple[Any, ...], tuple[Tap, np.ndarray]] = {}
    for tap, vector in measured:
        vector = _without_other_loops(vector, tap, stacked.get(tap.path, ()))
        key = (tap.path or tap.number, tap.recipe, tap.measure, vector.shape)
        if key in found:
            tap, before = found[key]
            vector = tap.measure.merged(np.stack([before, vector]), np)
        found[key] = (tap, vector)
    for tap, vector in found.values():
        for index in np.ndindex(vector.shape[:-1]):
            yield tap, index, vector[index]


def _without_other_loops(vector: np.ndarray, tap: Tap, layers: Sequence[int]) -> np.ndarray:
    """Merge `vector` along all loops but those over layers, the innermost of each length."""
    wanted = list(layers)
    for axis in reversed(range(len(tap.loops))):  # axes in front keep their places
        if wanted and tap.loops[axis].length == wanted[-1]:
            wanted.pop()
        else:
            vector = tap.measure.merged(np.moveaxis(vector, axis, 0), np)
    return vector
