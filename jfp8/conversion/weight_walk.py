"""Find the matmuls of a program with weights, and compute them otherwise.

A weight is what was computed from parameters and constants, and from no data. What is broadcast or
looked up is an activation next to a weight. What runs inside a function with its own derivative
(``custom_jvp``, ``custom_vjp``) is left alone: its derivative belongs to what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jfp8.conversion.weight_matmul import (
    PRODUCTS,
    Data,
    Place,
    Source,
    WeightMatmul,
    is_ordinary,
)
from jfp8.tracing import interpreter
from jfp8.tracing.compat import body_of, evaluate, jaxprs_of, scan_sizes, scope_of
from jfp8.tracing.interpreter import Emitted, Reader, Value, arrays, equations
from jfp8.tracing.notes import note

CONSTANT = "constant"
"""The note of what is computed from neither weights nor data."""

_CUTS = {"dynamic_slice", "slice", "split", "unstack"}
_NEW_TYPE = {"convert_element_type", "copy", "copy_p", "name", "pvary", "reduce_precision"}
_NEW_TYPE |= {
    "mesh_cast",
    "reshard",
    "sharding_constraint",
    "stop_gradient",
    "optimization_barrier",
}
_NEW_SHAPE = {"broadcast_in_dim", "reshape", "rev", "squeeze", "transpose"}
_JOINED = {"all_gather", "all_gather_invariant", "concatenate"}  # of parts of one, or of several
_MOVED = _CUTS | _NEW_TYPE | _NEW_SHAPE | _JOINED | {"gather", "pad"}
_TWO_WEIGHTS = "both operands are weights"

Note = Source | Data | str | None


@dataclass(frozen=True)
class Walk(Reader):
    """Hand each matmul with a weight to a function, which returns the result and what it emits.

    Attributes:
      compute: that function.
      loops: by the name of what is fed, the scans that slice it.
      of_activations: whether matmuls without a weight go to `compute`, too.
      emits: whether `compute` may emit anything.
    """

    compute: Callable[[WeightMatmul], tuple[jax.Array, Emitted]]
    loops: Mapping[str, Collection[Place]]
    of_activations: bool = False
    emits: bool = True

    def equation(self, eqn: Any, ins: list[Value], at: interpreter.Place) -> Any:
        """Hand a matmul to `compute`."""
        if eqn.primitive.name not in PRODUCTS:
            return None
        matmul = self._matmul(eqn, ins, at)
        weights = [isinstance(value.note, Source) for value in ins[:2]]
        if matmul is None:
            with note("reason", _TWO_WEIGHTS if all(weights) else ""):
                outs = evaluate(eqn, arrays(ins))
            made = _computed(eqn, ins) if all(weights) else Data(at.path)
            return [Value(outs[0], made)], []
        with scope_of(eqn):
            y, emitted = self.compute(matmul)
        return [Value(y, Data(at.path, (matmul.key, *matmul.sizes)))], emitted

    def _matmul(self, eqn: Any, ins: list[Value], at: interpreter.Place) -> WeightMatmul | None:
        """Return the matmul that `compute` gets; None for others."""
        (x, weight, *others), (lhs, rhs) = arrays(ins), (value.note for value in ins[:2])
        if not is_ordinary(eqn, x, weight):
            return None
        if (
            isinstance(lhs, Source)
            and isinstance(rhs, Source)
            and bool(lhs.repeats) != bool(rhs.repeats)
        ):
            lhs, rhs = (None, rhs) if lhs.repeats else (lhs, None)
        swapped = isinstance(lhs, Source) and eqn.primitive.name == "dot_general"
        if swapped:
            x, weight, lhs, rhs = weight, x, rhs, lhs
        is_weight = isinstance(rhs, Source) and not isinstance(lhs, Source) and np.ndim(weight) > 1
        is_weight = is_weight and rhs.repeats != "broadcast"
        no_weight = not isinstance(rhs, Source) and not isinstance(lhs, Source)
        if not is_weight and not (self.of_activations and no_weight):
            return None
        source = rhs if isinstance(rhs, Source) else Source("")
        data = lhs if isinstance(lhs, Data) else None
        return WeightMatmul(source, eqn, x, weight, swapped, tuple(others), at, data)

    def enters(self, eqn: Any, ins: Sequence[Value]) -> bool:
        """Enter what has matmuls, and what may move a weight, such as ``jnp.take``."""
        weights = any(isinstance(value.note, Source) for value in ins)
        if weights and eqn.primitive.name in interpreter.CALLS:
            return True
        return (weights or self.of_activations) and has_product(eqn)

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: interpreter.Place) -> Sequence[Value]:
        """Compute the equation, and note why its matmuls stay as they are."""
        del at
        with note("reason", f"inside {eqn.primitive.name}, which has a derivative of its own"):
            return self.as_it_is(eqn, ins)

    def constant(self, x: Any) -> Note:
        return None if isinstance(x, jax.core.Tracer) else CONSTANT

    def flow(self, eqn: Any, ins: Sequence[Value]) -> Sequence[Note]:
        return _flow(eqn, ins)

    def inner(self, notes: Sequence[Note]) -> list[Note]:
        """Return the notes without values, which would leave their trace."""
        return [replace(x, in_f32=None) if isinstance(x, Source) else x for x in notes]

    def in_loop(self, eqn: Any, notes: list[Any], at: Any, n_fixed: int, n: int) -> list[Note]:
        """Note which scan slices a weight; what a loop changes is data."""
        is_scan = eqn.primitive.name == "scan"
        jaxpr = body_of(eqn)[0] if is_scan else eqn.params["body_jaxpr"].jaxpr
        carried = zip(notes[n_fixed:n], jaxpr.invars[n_fixed:n], jaxpr.outvars)
        turn = at.path, eqn.params.get("length")

        def into(x: Note) -> Note:
            if isinstance(x, Source):
                return replace(x, loops=(*x.loops, turn))
            return x if x == CONSTANT else None

        kept = [x if v is w else None for x, v, w in carried]
        return [*notes[:n_fixed], *kept, *map(into, notes[n:])]

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[Note]:
        """Follow weights out of checkpoints, and those that a loop carries without a change."""
        name, n = eqn.primitive.name, len(eqn.outvars)
        if name not in ("scan", "while", "cond", "shard_map"):
            return results[0]
        if name in ("cond", "shard_map"):
            return [None] * n
        sizes = scan_sizes(eqn) if name == "scan" else (eqn.params["body_nconsts"], n)
        carried = inside[sizes[0] : sum(sizes)]
        return [*carried, *[None] * (n - len(carried))]

    def slices(self, name: str, at: interpreter.Place) -> bool:
        """Give each iteration its part of what is fed."""
        return at.path in self.loops[name]

    def leave_scan(self, key: Any, x: Any, eqn: Any, at: Any) -> Any:
        """Take the largest of all iterations, unless each has a state of its own."""
        return key, x if self.slices(key, at) else x.max(0)

    def merge(self, key: Any, stacked: Any) -> Any:
        return stacked.max(0)

    def nothing(self, key: Any, like: Any) -> Any:
        return jnp.zeros(like.shape, like.dtype)

    def merge_devices(self, key: Any, x: Any, axes: tuple[Any, ...]) -> Any:
        return jax.lax.pmax(x, axes) if axes else x


def has_product(eqn: Any) -> bool:
    """Return whether an equation multiplies matrices in one of its bodies."""
    inside = (inner for body in jaxprs_of(eqn) for inner, _, _ in equations(body))
    return any(inner.primitive.name in PRODUCTS for inner in inside)


def _flow(eqn: Any, ins: Sequence[Value]) -> Sequence[Note]:
    """Return what the results of an equation were made of."""
    name, n = eqn.primitive.name, len(eqn.outvars)
    notes = [value.note for value in ins]
    sources = [x for x in notes if isinstance(x, Source)]
    if name == "optimization_barrier":
        return notes
    if name in ("mul", "div") and sorted(np.size(value.array) for value in ins)[0] == 1:
        return [_scaled(notes)]
    if not sources:
        if all(x == CONSTANT for x in notes):
            return [CONSTANT] * n
        return [_same_data(eqn, notes[0])] * n
    first = notes[0]
    if name in _JOINED and len(sources) == len(notes):
        path = "+".join(dict.fromkeys(source.path for source in sources))
        return [replace(sources[0], path=path, in_f32=None, is_whole=False)]
    if name in _MOVED - {"concatenate"}:
        return _view(eqn, ins, first) if isinstance(first, Source) else [None] * n
    if any(not isinstance(x, Source) and x != CONSTANT for x in notes):
        return [None] * n
    return [_computed(eqn, ins)] * n


def _scaled(notes: Sequence[Note]) -> Note:
    """Return the note of a product with a number, which a scale makes good."""
    for x in notes:
        if isinstance(x, Source):
            return replace(x, in_f32=None, is_whole=False)
    if all(x == CONSTANT for x in notes):
        return CONSTANT
    factors = (x.factor for x in notes if isinstance(x, Data) and x.factor is not None)
    return Data(None, next(factors, None))


def _same_data(eqn: Any, of: Note) -> Note:
    """Return the note of `of` in another dtype or shape, such that equal notes are equal values."""
    if not isinstance(of, Data) or eqn.primitive.name not in _NEW_TYPE | _NEW_SHAPE:
        return None
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if before.size != after.size:
        return None
    how: tuple[Any, ...] = ()
    if before.dtype != after.dtype:
        how = "dtype", after.dtype
    elif eqn.primitive.name in _NEW_SHAPE:
        how = eqn.primitive.name, after.shape, eqn.params.get("permutation")
    return replace(of, key=(of.key, *how)) if how and of.key is not None else of


def _computed(eqn: Any, ins: Sequence[Value]) -> Source:
    """Return the source of what was computed from weights and constants."""
    found = [value for value in ins if isinstance(value.note, Source)]
    largest: Source = max(found, key=lambda value: np.size(value.array)).note
    sources: list[Source] = [value.note for value in found]
    repeats = [source.repeats for source in sources]
    how = "rows" if "rows" in repeats else "broadcast" if all(repeats) else ""
    loops = max((source.loops for source in sources), key=len)
    del eqn
    return Source(largest.path, repeats=how, loops=loops, is_whole=False)


def _view(eqn: Any, ins: Sequence[Value], source: Source) -> list[Note]:
    """Return the sources of an array in another form or dtype, or of parts of it."""
    name, outs = eqn.primitive.name, eqn.outvars
    x, after = ins[0].array, outs[0].aval
    if name == "convert_element_type":
        if not jnp.issubdtype(after.dtype, jnp.floating):
            return [None]
        narrower = jnp.result_type(x) == jnp.float32 and after.dtype.itemsize < 4
        return [replace(source, in_f32=x if narrower else None)]
    indices = [v.val for v in eqn.invars[1:] if isinstance(v, Literal)]
    is_computed = name == "dynamic_slice" and len(indices) < len(eqn.invars) - 1
    source = replace(source, is_whole=source.is_whole and name in _NEW_TYPE)
    views: list[Source] = [source] * len(outs)
    if name == "gather":
        views = [replace(source, repeats="rows")]
    elif name == "broadcast_in_dim" and after.size > np.size(x):
        views = [replace(source, repeats=source.repeats or "broadcast", in_f32=None)]
        return [*views]
    elif name in _CUTS and not is_computed:
        starts = eqn.params.get("start_indices", tuple(map(int, indices)))
        parts = [(*source.parts, (name, starts, i, v.aval.shape)) for i, v in enumerate(outs)]
        views = [replace(source, parts=part) for part in parts]
    wide: list[Any] = [None] * len(outs)
    if source.in_f32 is not None and name != "pad":
        others = arrays(ins[1:])
        wide = evaluate(eqn, [source.in_f32, *others])  # not computed where nobody reads it
    return [replace(view, in_f32=x) for view, x in zip(views, wide, strict=True)]
