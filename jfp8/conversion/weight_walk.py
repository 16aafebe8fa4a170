"""Find the matmuls of a program with weights, and compute them otherwise.

A weight is what was computed from parameters and constants, and from no data. What is broadcast or
looked up is an activation next to a weight. What runs inside a function with its own derivative
(``custom_jvp``, ``custom_vjp``) is left alone: its derivative belongs to what it computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jfp8.checkpoint_policies import seeing_fp8
from jfp8.conversion.groups import GROUP, elementwise, grouped, is_cheap, saves_less
from jfp8.conversion.weight_matmul import (
    INPUTS,
    PRODUCTS,
    Data,
    Place,
    Source,
    WeightMatmul,
    is_ordinary,
)
from jfp8.matmul.planner import planner_of
from jfp8.products.shared_input import SharedInput
from jfp8.recipes.in_effect import DISABLED, DISABLED_HERE
from jfp8.tracing import interpreter
from jfp8.tracing.caller import user_level
from jfp8.tracing.compat import body_of, evaluate, jaxprs_of, primitive_name, scan_sizes, scope_of
from jfp8.tracing.device import current_device, explicit_mesh
from jfp8.tracing.interpreter import Emitted, Reader, Value, arrays, equations, notes_in
from jfp8.tracing.notes import note

CONSTANT = "constant"
"""The note of what is computed from neither weights nor data."""

_STRAIGHT = interpreter.CALLS | interpreter.RULES | {"checkpoint", "shard_map"}
"""Primitives whose body runs once."""

_CUTS = {"dynamic_slice", "slice", "split", "unstack"}
_NEW_TYPE = {"convert_element_type", "copy", "copy_p", "name", "pvary"}
_NEW_TYPE |= {"mesh_cast", "reshard", "sharding_constraint", "stop_gradient"}
_NEW_SHAPE = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_JOINED = {"all_gather", "all_gather_invariant", "concatenate"}
_MOVED = _CUTS | _NEW_TYPE | _NEW_SHAPE | {"gather", "pad", "reduce_precision", "rev"}
Note = Source | Data | str | None


@dataclass(frozen=True)
class Walk(Reader):
    """Hand each matmul with a weight to a function, which returns the result and what it emits.

    Attributes:
      loops: by the name of what is fed, the scans that slice it.
      of_activations: whether matmuls without a weight go to `compute`, too.
      computed_again: the groups that save their inputs for the backward pass, if these are fewer
        bytes, because what they compute is saved by FP8 matmuls alone, as FP8.
      used: the keys of matmuls whose results were read as a whole, by other matmuls or loops.
    """

    emits = True
    compute: Callable[[WeightMatmul], tuple[jax.Array, Emitted]]
    loops: Mapping[str, Collection[Place]]
    of_activations: bool = False
    computed_again: Collection[Place] = ()
    used: set[Any] = field(default_factory=set)

    def grouped(self, eqns: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        return grouped(eqns, results)

    def _group(self, eqn: Any, ins: list[Value], at: interpreter.Place) -> Any:
        """Compute a group, which has no matmul, and note its place with the results."""
        if at.path not in self.computed_again:
            values, _ = interpreter.inline(self, eqn, ins, at)
            of_data = lambda x: replace(x, group=at.path) if isinstance(x, Data) else x
            return [x._replace(note=of_data(x.note)) for x in values], []
        f, inputs = jaxpr_as_fun(ClosedJaxpr(*body_of(eqn))), arrays(ins)
        # Loops save what JAX decides. Elsewhere XLA does, and a barrier would keep it from fusing.
        again = jax.checkpoint(f, prevent_cse=False)
        made = again(*inputs) if saves_less(f, *inputs) else f(*inputs)
        may = planner_of(current_device()).quantizes_by_kernels() and explicit_mesh(inputs) is None
        if may and (make := elementwise(eqn)) is not None:
            parts = [jnp.expand_dims(x, -2) for x in inputs]
            at.memo[at.path, 0] = SharedInput((make, *parts))
        return [Value(x, Data((at.path, i), group=at.path)) for i, x in enumerate(made)], []

    def equation(self, eqn: Any, ins: list[Value], at: interpreter.Place) -> Any:
        """Hand a matmul to `compute`, and tell apart the results of what runs as it is."""
        if eqn.primitive.name == GROUP and is_cheap(eqn):
            return self._group(eqn, ins, at)
        if self.enters(eqn, ins):
            return None
        if eqn.primitive.name not in PRODUCTS:
            origins = self._read_whole if _reads_whole(eqn) else origins_of
            of_all, flow = origins(notes_in(ins)), enumerate(_flow(eqn, ins))
            notes = [_identified(x, (at.path, i), of_all) for i, x in flow]
            return list(map(Value, evaluate(eqn, arrays(ins)), notes)), []
        self._read_whole(notes_in(ins))
        matmul = self._matmul(eqn, ins, at)
        both = all(isinstance(value.note, Source) for value in ins[:2])
        if matmul is None:
            disabled = DISABLED_HERE if DISABLED in at.stack else ""
            with note("reason", disabled or ("both operands are weights" if both else "")):
                outs = evaluate(eqn, arrays(ins))
            made = _computed(ins) if both and _of_weights(ins) else Data(at.path)
            return [Value(outs[0], made)], []
        with scope_of(eqn):
            y, emitted = self.compute(matmul)
        factor, origins = (matmul.key, *matmul.sizes), frozenset([matmul.key])
        return [Value(y, Data(at.path, factor, origins))], emitted

    def _read_whole(self, notes: Sequence[Note]) -> frozenset[Any]:
        """Note that these values are read as a whole; return the origins of the result."""
        origins = origins_of(notes)
        self.used.update(origins)
        return origins | INPUTS

    def _matmul(self, eqn: Any, ins: list[Value], at: interpreter.Place) -> WeightMatmul | None:
        """Return the matmul that `compute` gets; None for others."""
        x, weight, *others = ins
        if not is_ordinary(eqn, x.array, weight.array) or DISABLED in at.stack:
            return None
        swapped = eqn.primitive.name == "dot_general" and _is_weight(x, weight)
        if swapped:
            x, weight = weight, x
        source, data = weight.note, x.note if isinstance(x.note, Data) else None
        if not _is_weight(weight, x):
            if not self.of_activations or isinstance(source, Source) or isinstance(x.note, Source):
                return None
            source = Source("")
        return WeightMatmul(
            source, eqn, x.array, weight.array, swapped, tuple(arrays(others)), at, data
        )

    def enters(self, eqn: Any, ins: Sequence[Value]) -> bool:
        """Enter bodies with matmuls, and calls that may move a weight, such as ``jnp.take``."""
        weights = any(isinstance(value.note, Source) for value in ins)
        if weights and eqn.primitive.name in interpreter.CALLS:
            return True
        return (weights or self.of_activations) and has_product(eqn)

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: interpreter.Place) -> Sequence[Value]:
        """Compute the equation, and note why its matmuls stay as they are."""
        del at
        self._read_whole(notes_in(ins))
        name, reason = primitive_name(eqn), "which has a derivative of its own"
        if name not in interpreter.RULES:
            reason = "a primitive that jfp8 does not know"
            warnings.warn(
                f"Matmuls stay in high precision inside {name!r}, {reason}. To convert a weight's "
                "matmul, move it out of there.",
                UserWarning,
                stacklevel=user_level(),
            )
        with note("reason", f"inside {name}, {reason}"):
            return self.as_it_is(eqn, ins)

    def constant(self, x: Any) -> Note:
        return None if isinstance(x, jax.core.Tracer) else CONSTANT

    def policy(self, policy: Any) -> Any:
        """Let a policy decide on FP8 matmuls as on those that they replace."""
        return policy and seeing_fp8(policy)

    def inner(self, notes: Sequence[Note]) -> list[Note]:
        """Return the notes without values, which would leave their trace."""
        return [replace(x, in_f32=None) if isinstance(x, Source) else x for x in notes]

    def in_loop(self, eqn: Any, notes: list[Any], at: Any, n_fixed: int, n: int) -> list[Note]:
        """Note which scan slices a weight; what a loop changes is data."""
        is_scan = eqn.primitive.name == "scan"
        jaxpr = body_of(eqn)[0] if is_scan else eqn.params["body_jaxpr"].jaxpr
        carried = zip(notes[n_fixed:n], jaxpr.invars[n_fixed:n], jaxpr.outvars)
        turn, origins = (at.path, eqn.params.get("length")), self._read_whole(notes)

        def into(i: int, x: Note) -> Note:
            if isinstance(x, Source):
                return replace(x, loops=(*x.loops, turn))
            return x if x == CONSTANT else Data((at.path, "slice", i))

        kept = [
            x if v is w else Data((at.path, "carried", i)) for i, (x, v, w) in enumerate(carried)
        ]
        inside = [*notes[:n_fixed], *kept, *map(into, range(len(notes) - n), notes[n:])]
        # The results of one iteration go into the next.
        return [replace(x, origins=origins) if isinstance(x, Data) else x for x in inside]

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[Note]:
        """Follow weights out of checkpoints, and those that a loop carries without a change."""
        name, n = eqn.primitive.name, len(eqn.outvars)
        if name not in ("scan", "while", "cond", "shard_map"):
            return results[0]
        if name == "shard_map":
            return [Data(None, origins=origins_of([x])) for x in results[0]]
        data = Data(None, origins=self._read_whole(inside))
        if name == "cond":
            return [data] * n
        sizes = scan_sizes(eqn) if name == "scan" else (eqn.params["body_nconsts"], n)
        carried = [x if isinstance(x, Source) else data for x in inside[sizes[0] : sum(sizes)]]
        return [*carried, *[data] * (n - len(carried))]

    def slices(self, name: str, at: interpreter.Place) -> bool:
        """Give each iteration its part of what is fed."""
        return at.path in self.loops[name]

    def leave_scan(self, key: Any, x: Any, eqn: Any, at: Any) -> Any:
        """Take the largest of all iterations, unless each has its own state."""
        return key, x if self.slices(key, at) else x.max(0, initial=0)

    def merge(self, key: Any, stacked: Any) -> Any:
        return stacked.max(0)

    def nothing(self, key: Any, like: Any) -> Any:
        return jnp.zeros(like.shape, like.dtype)

    def merge_devices(self, key: Any, x: Any, axes: tuple[Any, ...]) -> Any:
        return jax.lax.pmax(x, axes) if axes else x


def _inside(eqn: Any) -> Iterator[Any]:
    """List the equations in the bodies of an equation."""
    return (inner for body in jaxprs_of(eqn) for inner, _, _ in equations(body))


def has_product(eqn: Any) -> bool:
    """Return whether an equation multiplies matrices in one of its bodies."""
    return any(inner.primitive.name in PRODUCTS for inner in _inside(eqn))


def _reads_whole(eqn: Any) -> bool:
    """Return whether an equation reads its operands as a whole: it has a matmul or a loop."""
    loops = lambda eqn: primitive_name(eqn) not in _STRAIGHT and any(jaxprs_of(eqn))
    return any(loops(x) or x.primitive.name in PRODUCTS for x in (eqn, *_inside(eqn)))


def origins_of(notes: Sequence[Note]) -> frozenset[Any]:
    """Return the origins of what was computed from values with these notes, see `Data`."""
    found: frozenset[Any] = frozenset()
    for x in notes:
        is_weight = x == CONSTANT or isinstance(x, Source) and x.repeats != "rows"
        found |= x.origins if isinstance(x, Data) else frozenset() if is_weight else INPUTS
    return found


def _is_weight(value: Value, other: Value) -> bool:
    """Return whether a value is a weight next to `other`, and that is none."""
    x, y = value.note, other.note
    if not isinstance(x, Source) or x.repeats == "broadcast" or np.ndim(value.array) < 2:
        return False
    return not isinstance(y, Source) or bool(y.repeats and not x.repeats)


def _of_weights(ins: Sequence[Value]) -> bool:
    """Return whether all are weights or constants; what was looked up gives data."""
    notes = [value.note for value in ins if value.note != CONSTANT]
    return all(isinstance(x, Source) and x.repeats != "rows" for x in notes)


def _identified(x: Note, key: Any, origins: frozenset[Any]) -> Note:
    """Return the note of a value with its `origins`; of new data with this `key`."""
    x = Data(None) if x is None else x
    if not isinstance(x, Data):
        return x
    return replace(x, key=key if x.key is None else x.key, origins=origins)


def _flow(eqn: Any, ins: Sequence[Value]) -> Sequence[Note]:
    """Return what the results of an equation were made of."""
    name, n = primitive_name(eqn), len(eqn.outvars)
    notes = [value.note for value in ins]
    if name == "optimization_barrier":
        return notes
    larger = [value.note for value in ins if np.size(value.array) > 1]
    if name in ("mul", "div") and len(larger) == 1 and larger != [CONSTANT]:
        return [_scaled(larger[0])]
    if all(x == CONSTANT for x in notes):
        return [CONSTANT] * n
    if name in _MOVED and isinstance(notes[0], Source):
        return _view(eqn, ins, notes[0])
    if name not in _MOVED and _of_weights(ins):
        return [_joined(notes, ins) if name in _JOINED else _computed(ins)] * n
    return [_same_data(eqn, notes[0])] * n


def _joined(sources: Sequence[Any], ins: Sequence[Value]) -> Source:
    """Return the source of several weights next to each other."""
    if CONSTANT in sources:
        return _computed(ins)
    path = "+".join(dict.fromkeys(source.path for source in sources))
    return replace(sources[0], path=path, in_f32=None, is_whole=False)


def _scaled(x: Note) -> Note:
    """Return the note of `x` times a number, which a scale makes good."""
    if isinstance(x, Source):
        return replace(x, in_f32=None, is_whole=False)
    return Data(None, x.factor) if isinstance(x, Data) else None


def _same_data(eqn: Any, of: Note) -> Note:
    """Return the note of `of` in another dtype or shape, such that equal notes are equal values."""
    if not isinstance(of, Data) or primitive_name(eqn) not in _NEW_TYPE | _NEW_SHAPE:
        return None
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if before.size != after.size:
        return None
    how: tuple[Any, ...] = ()
    if before.dtype != after.dtype:
        how = "dtype", after.dtype
    elif eqn.primitive.name in _NEW_SHAPE:
        order = eqn.params.get("permutation"), eqn.params.get("broadcast_dimensions")
        how = eqn.primitive.name, after.shape, order
    return replace(of, key=(of.key, *how)) if how and of.key is not None else of


def _computed(ins: Sequence[Value]) -> Source:
    """Return the source of what was computed from weights and constants."""
    found = [value for value in ins if isinstance(value.note, Source)]
    largest: Source = max(found, key=lambda value: np.size(value.array)).note
    sources: list[Source] = [value.note for value in found]
    how = "broadcast" if all(source.repeats for source in sources) else ""
    loops = max((source.loops for source in sources), key=len)
    return Source(largest.path, repeats=how, loops=loops, is_whole=False)


def _view(eqn: Any, ins: Sequence[Value], source: Source) -> list[Note]:
    """Return the sources of an array in another form or dtype, or of parts of it."""
    name, x, after = primitive_name(eqn), ins[0].array, eqn.outvars[0].aval
    if name == "convert_element_type":
        if not jnp.issubdtype(after.dtype, jnp.floating):
            return [None]
        narrower = jnp.result_type(x) == jnp.float32 and after.dtype.itemsize < 4
        return [replace(source, in_f32=x if narrower else None)]
    source = replace(source, is_whole=source.is_whole and name in _NEW_TYPE)
    if name == "broadcast_in_dim" and after.size > np.size(x):
        return [replace(source, repeats=source.repeats or "broadcast", in_f32=None)]
    views = _cut(eqn, replace(source, repeats="rows") if name == "gather" else source)
    wide: list[Any] = [None] * len(views)
    if source.in_f32 is not None and name != "pad":  # not computed where nobody reads it
        wide = evaluate(eqn, [source.in_f32, *arrays(ins[1:])])
    return [replace(view, in_f32=x) for view, x in zip(views, wide, strict=True)]


def _cut(eqn: Any, source: Source) -> list[Source]:
    """Return the sources of slices at known indices, by which matmuls are told apart."""
    name, indices = eqn.primitive.name, [v.val for v in eqn.invars[1:] if isinstance(v, Literal)]
    is_computed = name == "dynamic_slice" and len(indices) < len(eqn.invars) - 1
    if name not in _CUTS or is_computed:
        return [source] * len(eqn.outvars)
    starts = eqn.params.get("start_indices", tuple(map(int, indices)))
    parts = ((name, starts, i, v.aval.shape) for i, v in enumerate(eqn.outvars))
    return [replace(source, parts=(*source.parts, part)) for part in parts]
