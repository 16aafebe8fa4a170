"""Evaluate a traced program with taps in it, and merge the measurements at the taps by layer.

Measurements leave a ``scan`` stacked along a new leading axis, one for each iteration; those of a
``while`` are merged, because their number is not known. ``vmap`` and devices are merged as well. A
branch that is not taken measures nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jfp8.conversion.edges import jaxprs_of
from jfp8.debug.measurement import Measurement
from jfp8.products.observers import TAP
from jfp8.tracing.compat import body_of, context_of, evaluate, scan_sizes, varying_axes
from jfp8.tracing.notes import notes_of, product_path

# What a value is computed from: inputs of the loops around it, each an object of its own.
Origins = frozenset[object]


@dataclass(frozen=True)
class Loop:
    """A ``scan`` around a tap."""

    length: int
    # The tapped weight is computed from what the loop runs over, and from nothing that it carries:
    # then it belongs to another layer in each iteration.
    over_inputs: bool


@dataclass(frozen=True)
class Place:
    """The place of a tap in a program."""

    measure: Measurement
    stack: str  # names of the scopes that it is in, with the notes for `jfp8.report`
    number: int  # counts taps in the order of the program
    loops: tuple[Loop, ...]  # around it, outermost first: leading axes of the measurement
    origins: Origins  # of the weight, if one is tapped; empty in what `read` returns


Found = list[tuple[Place, jax.Array]]


class _Value(NamedTuple):
    """A value of the program under evaluation, and what it is computed from."""

    array: Any
    origins: Origins = frozenset()


def read(closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Found]:
    """Return the results of a program, and ``f32[*loops, W]`` measured at each of its taps."""
    outs, found = _evaluated(closed.jaxpr, closed.consts, list(map(_Value, arguments)), "")
    numbered = [
        (replace(place, number=i, origins=frozenset()), vector)
        for i, (place, vector) in enumerate(found)
    ]
    return _arrays(outs), numbered


def _evaluated(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[_Value], stack: str
) -> tuple[list[_Value], Found]:
    values: dict[Var, _Value] = dict(zip(jaxpr.constvars, map(_Value, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    last_use.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, Var))
    found: Found = []
    value_of = lambda v: _Value(v.val) if isinstance(v, Literal) else values[v]
    for i, eqn in enumerate(jaxpr.eqns):
        ins = list(map(value_of, eqn.invars))
        here = f"{stack}/{eqn.source_info.name_stack}"
        if not _has_taps(eqn):
            outs = _with_origins(ins, evaluate(eqn, _arrays(ins)))
        else:
            with context_of(eqn):
                outs, more = _reader_of(eqn)(eqn, ins, here)
            found += more
        values.update(zip(eqn.outvars, outs, strict=True))
        for v in {v for v in eqn.invars if isinstance(v, Var)}:
            if last_use[v] == i:
                del values[v]  # or everything that a program computes would stay alive to its end
    return list(map(value_of, jaxpr.outvars)), found


def _arrays(values: Sequence[_Value]) -> list[Any]:
    return [value.array for value in values]


def _origins(values: Sequence[_Value]) -> Origins:
    return frozenset().union(*(value.origins for value in values))


def _with_origins(ins: Sequence[_Value], outs: Sequence[Any]) -> list[_Value]:
    """Note that each result of an equation may depend on all of its operands `ins`."""
    together = _origins(ins)
    return [_Value(out, together) for out in outs]


def _has_taps(eqn: Any) -> bool:
    return eqn.primitive is TAP or any(
        _has_taps(inner) for jaxpr in jaxprs_of(eqn) for inner in jaxpr.eqns
    )


Reader = Callable[[Any, list[_Value], str], tuple[list[_Value], Found]]


def _reader_of(eqn: Any) -> Reader:
    name = eqn.primitive.name
    if name in _READERS:
        return _READERS[name]
    if len(list(jaxprs_of(eqn))) == 1:
        return _read_call
    raise NotImplementedError(
        f"Statistics of products inside {name!r} cannot be taken out of it. Call "
        "jfp8.debug.stats on a function without it."
    )


def _read_tap(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    vector_of = measure = eqn.params["measure"]
    batched = eqn.params["batched"]
    for _ in range(batched):
        vector_of = jax.vmap(vector_of)
    vector = vector_of(*_arrays(ins))
    for _ in range(batched):
        vector = measure.merged(vector)
    origins = frozenset() if measure.weight is None else ins[measure.weight].origins
    return ins[:1], [(Place(measure, stack, 0, (), origins), vector)]


def _read_call(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    """Evaluate, inline, an equation that calls one program once."""
    (jaxpr,) = jaxprs_of(eqn)
    closed = [value for value in eqn.params.values() if isinstance(value, ClosedJaxpr)]
    return _evaluated(jaxpr, closed[0].consts if closed else (), ins, stack)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Measured:
    """Measurements in a program that JAX traces, with their places as a part of the structure."""

    vectors: list[jax.Array]
    places: tuple[Place, ...] = field(metadata={"static": True})

    def found(self) -> Found:
        return list(zip(self.places, self.vectors, strict=True))

    def of_nothing(self) -> list[jax.Array]:
        """Return vectors of these shapes as of empty tensors."""
        nothing = lambda place, like: jnp.broadcast_to(place.measure.nothing(), like.shape)
        return list(map(nothing, self.places, self.vectors))


Body = Callable[[Sequence[Any]], tuple[list[Any], _Measured]]


def _body(jaxpr: Jaxpr, consts: Sequence[Any], origins: Sequence[Origins], stack: str) -> Body:
    """Return a part of a program that JAX traces again as a function of arrays."""

    def run(arrays: Sequence[Any]) -> tuple[list[Any], _Measured]:
        outs, found = _evaluated(jaxpr, consts, list(map(_Value, arrays, origins)), stack)
        vectors = [vector for _, vector in found]
        return _arrays(outs), _Measured(vectors, tuple(place for place, _ in found))

    return run


def _read_checkpoint(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    """Keep ``jax.checkpoint``, or XLA would store what is to be computed again."""
    body = _body(*body_of(eqn), [value.origins for value in ins], stack)
    run = lambda *arrays: body(arrays)
    traced, (_, measured) = jax.make_jaxpr(run, return_shape=True)(*_arrays(ins))
    assert not traced.consts, "what the body needs comes in as an argument"
    again = eqn.replace(params={**eqn.params, "jaxpr": traced.jaxpr})
    results = evaluate(again, _arrays(ins))
    n = len(eqn.outvars)
    return _with_origins(ins, results[:n]), list(zip(measured.places, results[n:], strict=True))


def _read_scan(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    n_consts, n_carry = scan_sizes(eqn)
    fixed, carry, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
    carried, scanned = object(), object()
    origins = [
        *(value.origins for value in fixed),
        *[_origins(ins) | {carried}] * n_carry,
        *(value.origins | {scanned} for value in xs),
    ]
    body = _body(*body_of(eqn), origins, stack)

    def turn(carry: list[Any], xs: list[Any]) -> Any:
        outs, measured = body([*_arrays(fixed), *carry, *xs])
        return outs[:n_carry], (outs[n_carry:], measured)

    options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    last, (ys, measured) = lax.scan(turn, _arrays(carry), _arrays(xs), **options)

    def inside(place: Place) -> Place:
        over_inputs = scanned in place.origins and carried not in place.origins
        return replace(place, loops=(Loop(eqn.params["length"], over_inputs), *place.loops))

    found = [(inside(place), vector) for place, vector in measured.found()]
    return _with_origins(ins, [*last, *ys]), found


def _read_while(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, closed = jaxpr_as_fun(eqn.params["cond_jaxpr"]), eqn.params["body_jaxpr"]
    arrays = _arrays(ins)
    for_condition, rest = arrays[:n_cond], arrays[n_cond:]
    fixed, carry = rest[:n_body], rest[n_body:]
    body = _body(closed.jaxpr, closed.consts, [_origins(ins)] * len(rest), stack)
    turn = lambda carry: body([*fixed, *carry])
    _, measured = jax.eval_shape(turn, carry)

    def again(state: Any) -> Any:
        outs, more = turn(state[0])
        pairs = zip(measured.places, state[1], more.vectors, strict=True)
        return outs, [place.measure.merged(jnp.stack([a, b])) for place, a, b in pairs]

    start = (carry, measured.of_nothing())
    carry, vectors = lax.while_loop(lambda s: condition(*for_condition, *s[0])[0], again, start)
    return _with_origins(ins, carry), list(zip(measured.places, vectors, strict=True))


def _read_cond(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    which, *operands = _arrays(ins)
    origins = [value.origins for value in ins[1:]]
    bodies = [_body(b.jaxpr, b.consts, origins, stack) for b in eqn.params["branches"]]
    every = [jax.eval_shape(body, operands)[1] for body in bodies]

    def taken(number: int, operands: list[Any]) -> Any:
        outs, measured = bodies[number](operands)
        vectors = [branch.of_nothing() for branch in every]
        vectors[number] = measured.vectors
        return outs, vectors

    runs = [partial(taken, number) for number in range(len(bodies))]
    outs, vectors = lax.switch(which, runs, operands)
    places = [place for branch in every for place in branch.places]
    found = list(zip(places, itertools.chain(*vectors), strict=True))
    return _with_origins(ins, outs), found


def _read_shard_map(eqn: Any, ins: list[_Value], stack: str) -> tuple[list[_Value], Found]:
    params = eqn.params
    body = _body(*body_of(eqn), [value.origins for value in ins], stack)
    axes = tuple(params["newly_manual_axes"])

    def over(vector: jax.Array) -> tuple[Any, ...]:
        """Return the axes along which devices differ; all axes if JAX does not keep track."""
        return tuple(a for a in axes if not params["check_vma"] or a in varying_axes(vector))

    def run(*arrays: Any) -> Any:
        outs, measured = body(arrays)
        merged = [p.measure.merged_over_devices(v, over(v)) for p, v in measured.found()]
        return tuple(outs), replace(measured, vectors=merged)

    outs, measured = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec()),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(*_arrays(ins))
    return _with_origins(ins, outs), measured.found()


_READERS: dict[str, Reader] = {
    TAP.name: _read_tap,
    "scan": _read_scan,
    "while": _read_while,
    "cond": _read_cond,
    "checkpoint": _read_checkpoint,
    "remat2": _read_checkpoint,
    "shard_map": _read_shard_map,
}


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
