"""Quantize weights once, before a loop over micro-batches, instead of in each iteration.

An iteration computes some values from the parameters alone, the same in every iteration. Of these
results, arrays much smaller than the parameters that they are computed from (f8 bytes, scales) are
computed before the loop and stored. Later results stay inside the loop, because storing them
would take more memory than the parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import FORMATS, format_of
from jfp8.tracing import interpreter
from jfp8.tracing.compat import body_of, primitive_name, scan_sizes
from jfp8.tracing.interpreter import CALLS, Computed, Emitted, Place, Reader, Value
from jfp8.tracing.shardings import sharded_like

_NARROW = {np.dtype(fmt.dtype) for fmt in FORMATS}

_VIEWS = {"bitcast_convert_type", "convert_element_type", "name", "reshape", "squeeze"}

# For each variable: None if it varies, else the bytes of the largest known input that it depends
# on, 0 for constants.
Root = int | None


def split(
    function: Callable[[Any, Any], Any], known: Any, varying: Any
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Split a function of pytrees into the part that depends only on `known`, and the rest.

    Return ``(kept, rest)`` with ``rest(kept, varying) == function(known, varying)``. Only the
    shapes of `varying` matter here.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(known, varying)
    structure = jax.tree.structure(shapes)
    leaves = jax.tree.leaves(known)
    roots = [*map(_bytes, closed.jaxpr.invars[: len(leaves)])]
    roots += [None] * (len(closed.jaxpr.invars) - len(leaves))
    plans = dict(_plans(closed.jaxpr, roots, ()))

    def run(reader: Reader, arguments: Sequence[Any], at: Place) -> tuple[list[Value], Emitted]:
        return interpreter.run(reader, closed.jaxpr, closed.consts, map(Value, arguments), at)

    unknown = [None] * (len(roots) - len(leaves))
    _, kept = run(_Early(plans), [*leaves, *unknown], Place())

    def rest(kept: Any, varying: Any) -> Any:
        outs, _ = run(_Late(plans), [*leaves, *jax.tree.leaves(varying)], Place(feeds=kept))
        return jax.tree.unflatten(structure, interpreter.arrays(outs))

    return dict(kept), rest


class _Plan(NamedTuple):
    """The part of a jaxpr that is computed early."""

    kept: Mapping[Var, PartitionSpec]  # computed early and kept, with their explicit shardings
    early: frozenset[int]  # indices of the equations that these need


Path = tuple[int, ...]
Plans = Mapping[Path, _Plan]
"""The plans of a program, and of the bodies in it in which something is kept, by their paths."""


def _plans(jaxpr: Jaxpr, roots: Sequence[Root], path: Path) -> Iterator[tuple[Path, _Plan]]:
    root: dict[Var, Root] = dict.fromkeys(jaxpr.constvars, 0)
    root.update(zip(jaxpr.invars, roots, strict=True))
    made_by: dict[Var, int] = {}
    for_bodies: list[Any] = []
    needed: list[Any] = list(jaxpr.outvars)
    for i, eqn in enumerate(jaxpr.eqns):
        ins = [0 if isinstance(v, Literal) else root[v] for v in eqn.invars]
        made_by.update(dict.fromkeys(eqn.outvars, i))
        known = [n for n in ins if n is not None]
        if len(known) == len(ins) and not eqn.effects:
            root.update(dict.fromkeys(eqn.outvars, max(known, default=0)))
            continue
        root.update(dict.fromkeys(eqn.outvars, None))
        needed += eqn.invars
        body = _body_roots(eqn, ins)
        if body is not None and any(body[1]):
            inside = list(_plans(*body, (*path, i)))
            if any(plan.kept for _, plan in inside):
                for_bodies += eqn.invars
                yield from inside

    def is_small(v: Var) -> bool:
        largest = root[v] or 0
        small = _dtype(v) in _NARROW or 2 * _bytes(v) < largest
        is_mask = str(_dtype(v)) == "bool"
        return v in made_by and largest > 0 and small and not is_mask

    def is_kept(v: Var) -> bool:
        source: Any = v
        while source in made_by and primitive_name(jaxpr.eqns[made_by[source]]) in _VIEWS:
            source = jaxpr.eqns[made_by[source]].invars[0]
            if isinstance(source, Literal) or root[source] is None:
                break
            # Other views of bytes that are kept, here or by the caller, cost nothing.
            if is_small(source) or (source not in made_by and _dtype(source) in _NARROW):
                return False
        return is_small(v)

    # From the needs of the rest back to values small enough to keep, and from there to the origins.
    kept = _reached(jaxpr, needed, made_by, root, until=is_kept)
    early = _reached(jaxpr, [*kept, *for_bodies], made_by, root, until=lambda v: False)
    keep = {v: _spec_outside(v, jaxpr, made_by, root) for v in kept if is_kept(v)}
    yield path, _Plan(keep, frozenset(made_by[v] for v in early if v in made_by))


def _spec_outside(
    v: Var, jaxpr: Jaxpr, made_by: dict[Var, int], root: dict[Var, Root]
) -> PartitionSpec:
    """Return the sharding of `v`, or of the array outside ``auto_axes`` that it comes from."""
    while v in made_by and _is_inside(v):
        named = [w for w in jaxpr.eqns[made_by[v]].invars if not isinstance(w, Literal)]
        v = max(named, key=lambda w: root[w] or 0)
    return _sharding(v).spec


def _reached(
    jaxpr: Jaxpr,
    start: Sequence[Any],
    made_by: dict[Var, int],
    root: dict[Var, Root],
    until: Callable[[Var], bool],
) -> list[Var]:
    """List the known variables that `start` depends on, no further than variables in `until`."""
    found: dict[Var, None] = {}
    todo = [v for v in start if not isinstance(v, Literal)]
    while todo:
        v = todo.pop()
        if v in found or root.get(v) is None:
            continue
        found[v] = None
        if v in made_by and not until(v):
            todo += [w for w in jaxpr.eqns[made_by[v]].invars if not isinstance(w, Literal)]
    return list(found)


def _body_roots(eqn: JaxprEqn, ins: Sequence[Root]) -> tuple[Jaxpr, list[Root]] | None:
    """Return the body of an equation that calls one, and the roots of its inputs."""
    if eqn.primitive.name == "scan":
        n_consts, n_carry = scan_sizes(eqn)
        length = max(eqn.params["length"], 1)
        of_a_turn = [None if n is None else n // length for n in ins[n_consts + n_carry :]]
        return body_of(eqn)[0], [*ins[:n_consts], *[None] * n_carry, *of_a_turn]
    if primitive_name(eqn) in (*CALLS, "checkpoint"):
        return body_of(eqn)[0], list(ins)
    return None


class _Split(Reader):
    """Enter the bodies in which something is kept, under ``(path, number of a result)``."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans

    def plan_of(self, at: Place) -> _Plan:
        """Return the plan of the program in which an equation is."""
        return self.plans[at.path[:-1]]


class _Early(_Split):
    """Compute what is kept, and emit it. Values that vary are None."""

    emits = True

    def equation(self, eqn: Any, ins: list[Value], at: Place) -> Computed:
        """Compute an equation that a kept value needs, and no other."""
        if at.path in self.plans:
            n, n_carry = scan_sizes(eqn) if eqn.primitive.name == "scan" else (len(ins), 0)
            varying = [Value(None)] * n_carry  # even if it is known at the start
            return interpreter.enter(self, eqn, [*ins[:n], *varying, *ins[n + n_carry :]], at)
        plan = self.plan_of(at)
        if at.path[-1] not in plan.early:
            return [Value(None)] * len(eqn.outvars), []
        outs = self.as_it_is(eqn, ins)
        kept = [
            ((at.path, i), sharded_like(plan.kept[v], _to_bytes, out.array))
            for i, (v, out) in enumerate(zip(eqn.outvars, outs, strict=True))
            if v in plan.kept
        ]
        return outs, kept


class _Late(_Split):
    """Compute all the rest, from what is kept."""

    def equation(self, eqn: Any, ins: list[Value], at: Place) -> Computed:
        """Take kept values, and compute all others."""
        if at.path in self.plans:
            return None
        kept = self.plan_of(at).kept
        given = {
            i: Value(_from_bytes(at.feeds[at.path, i], v))
            for i, v in enumerate(eqn.outvars)
            if v in kept
        }
        outs = given if len(given) == len(eqn.outvars) > 0 else self.as_it_is(eqn, ins)
        return [given.get(i, outs[i]) for i in range(len(eqn.outvars))], []

    def slices(self, name: Any, at: Place) -> bool:
        """Slice the values kept inside a ``scan``."""
        return name[0][: len(at.path)] == at.path


# Narrow arrays are kept as uint8: XLA:CPU widens f8 arrays to f16 if it stores them across a loop.


def _to_bytes(x: jax.Array) -> jax.Array:
    return codes_of(x) if x.dtype in _NARROW else x


def _from_bytes(x: jax.Array, v: Var) -> jax.Array:
    if _is_inside(v):
        with jax.sharding.use_abstract_mesh(_sharding(v).mesh):
            return _from_bytes(jax.sharding.reshard(x, PartitionSpec()), v)
    return codes_to_format(x, format_of(_dtype(v))) if _dtype(v) in _NARROW else x


def _is_inside(v: Var) -> bool:
    """Return whether an array is inside ``jax.sharding.auto_axes``."""
    here = jax.sharding.get_abstract_mesh()
    return bool(here.explicit_axes) and _sharding(v).mesh != here


def _sharding(v: Var) -> Any:
    return getattr(v.aval, "sharding", None)


def _dtype(v: Var) -> Any:
    return getattr(v.aval, "dtype", None)


def _bytes(v: Var) -> int:
    return getattr(v.aval, "size", 0) * getattr(_dtype(v), "itemsize", 4)  # a key has none
