"""Quantize weights once, before a loop over micro-batches, instead of in each iteration.

An iteration computes some values from the parameters alone, the same in every iteration. Of these
results, arrays much smaller than the parameters that they are computed from (f8 bytes, scales) are
computed before the loop and stored. Later results stay inside the loop, because storing them
would take more memory than the parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import FORMATS, format_of
from jfp8.tracing.compat import body_of, evaluate, scan_sizes

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
    plan = _plan(closed.jaxpr, roots)
    unknown = [None] * (len(roots) - len(leaves))
    kept = _early(plan, closed.consts, [*leaves, *unknown])

    def rest(kept: Any, varying: Any) -> Any:
        arguments = [*leaves, *jax.tree.leaves(varying)]
        return jax.tree.unflatten(structure, _late(plan, closed.consts, arguments, kept))

    return kept, rest


@dataclass(frozen=True)
class _Plan:
    """The part of a jaxpr that is computed early."""

    jaxpr: Jaxpr
    kept: tuple[Var, ...]  # computed early and kept
    early: frozenset[int]  # indices of the equations that these need
    inner: dict[int, _Plan]  # of bodies of equations (by index) inside which something is kept


def _plan(jaxpr: Jaxpr, roots: Sequence[Root]) -> _Plan:
    root: dict[Var, Root] = dict.fromkeys(jaxpr.constvars, 0)
    root.update(zip(jaxpr.invars, roots, strict=True))
    made_by: dict[Var, int] = {}
    inner: dict[int, _Plan] = {}
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
            plan = _plan(*body)
            if plan.kept or plan.inner:
                inner[i] = plan

    def is_small(v: Var) -> bool:
        largest = root[v] or 0
        small = _dtype(v) in _NARROW or 2 * _bytes(v) < largest
        is_mask = str(_dtype(v)) == "bool"
        return v in made_by and largest > 0 and small and not is_mask and _may_leave(v.aval)

    def is_kept(v: Var) -> bool:
        source: Any = v
        while source in made_by and jaxpr.eqns[made_by[source]].primitive.name in _VIEWS:
            source = jaxpr.eqns[made_by[source]].invars[0]
            if isinstance(source, Literal) or root[source] is None:
                break
            # Other views of bytes that are kept, here or by the caller, cost nothing.
            if is_small(source) or (source not in made_by and _dtype(source) in _NARROW):
                return False
        return is_small(v)

    # From the needs of the rest back to values small enough to keep, and from there to the origins.
    kept = _reached(jaxpr, needed, made_by, root, until=is_kept)
    for_bodies = [v for i in inner for v in jaxpr.eqns[i].invars]
    early = _reached(jaxpr, [*kept, *for_bodies], made_by, root, until=lambda v: False)
    keep = tuple(v for v in kept if is_kept(v))
    return _Plan(jaxpr, keep, frozenset(made_by[v] for v in early if v in made_by), inner)


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
        consts, carry, xs = _scan_arguments(eqn, ins)
        length = max(eqn.params["length"], 1)
        of_a_turn = [None if n is None else n // length for n in xs]
        return body_of(eqn)[0], [*consts, *[None] * len(carry), *of_a_turn]
    if eqn.primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
        return body_of(eqn)[0], list(ins)
    return None


# The kept values of a program: (values of plan.kept, {index: kept values of that equation's body}).


def _early(plan: _Plan, consts: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Compute the kept values. Arguments that vary are None."""
    values = _values(plan, consts, arguments)
    read = lambda v: v.val if isinstance(v, Literal) else values.get(v)
    bodies = {}
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if i in plan.early:
            values.update(zip(eqn.outvars, evaluate(eqn, list(map(read, eqn.invars))), strict=True))
        elif i in plan.inner:
            bodies[i] = _early_body(plan.inner[i], eqn, list(map(read, eqn.invars)))
    return [_to_bytes(values[v]) for v in plan.kept], bodies


def _early_body(plan: _Plan, eqn: JaxprEqn, arguments: list[Any]) -> Any:
    if eqn.primitive.name != "scan":
        return _early(plan, body_of(eqn)[1], arguments)
    consts, carry, xs = _scan_arguments(eqn, arguments)
    turn = lambda _, xs: (None, _early(plan, body_of(eqn)[1], [*consts, *[None] * len(carry), *xs]))
    return lax.scan(turn, None, xs, length=eqn.params["length"])[1]


def _late(plan: _Plan, consts: Sequence[Any], arguments: Sequence[Any], kept: Any) -> list[Any]:
    """Compute the results, from all arguments and the values kept by `_early`."""
    values = _values(plan, consts, arguments)
    given, bodies = kept
    values.update((v, _from_bytes(x, v)) for v, x in zip(plan.kept, given, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if eqn.outvars and all(v in values for v in eqn.outvars):
            continue
        ins = list(map(read, eqn.invars))
        if i in plan.inner:
            outs = _late_body(plan.inner[i], eqn, ins, bodies[i])
        else:
            outs = evaluate(eqn, ins)
        values.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if v not in values)
    return list(map(read, plan.jaxpr.outvars))


def _late_body(plan: _Plan, eqn: JaxprEqn, arguments: list[Any], kept: Any) -> Sequence[Any]:
    run = lambda arguments, kept: _late(plan, body_of(eqn)[1], arguments, kept)
    if eqn.primitive.name == "scan":
        consts, carry, xs = _scan_arguments(eqn, arguments)

        def turn(carry, xs_and_kept):
            xs, kept = xs_and_kept
            outs = run([*consts, *carry, *xs], kept)
            return outs[: len(carry)], outs[len(carry) :]

        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(turn, carry, (xs, kept), **options)
        return [*carry, *ys]
    if eqn.primitive.name in ("jit", "pjit"):
        return run(arguments, kept)
    leaves, structure = jax.tree.flatten((arguments, kept))
    body = jax.make_jaxpr(lambda *leaves: run(*jax.tree.unflatten(structure, leaves)))(*leaves)
    assert not body.consts, "what the body needs comes in as an argument"
    return evaluate(eqn.replace(params={**eqn.params, "jaxpr": body.jaxpr}), leaves)


def _values(plan: _Plan, consts: Sequence[Any], arguments: Sequence[Any]) -> dict[Var, Any]:
    values = dict(zip(plan.jaxpr.constvars, consts, strict=True))
    values.update(zip(plan.jaxpr.invars, arguments, strict=True))
    return values


def _scan_arguments(eqn: JaxprEqn, arguments: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Split arguments of a scan into constants, carry and arrays to scan over."""
    n_consts, n_carry = scan_sizes(eqn)
    start = n_consts + n_carry
    return arguments[:n_consts], arguments[n_consts:start], arguments[start:]


# Narrow arrays are kept as uint8: XLA:CPU widens f8 arrays to f16 if it stores them across a loop.


def _to_bytes(x: jax.Array) -> jax.Array:
    return codes_of(x) if x.dtype in _NARROW else x


def _from_bytes(x: jax.Array, v: Var) -> jax.Array:
    return codes_to_format(x, format_of(_dtype(v))) if _dtype(v) in _NARROW else x


def _may_leave(aval: Any) -> bool:
    """Return False inside ``jax.sharding.auto_axes``, whose arrays may not be on explicit axes."""
    here = jax.sharding.get_abstract_mesh()
    return not here.explicit_axes or aval.sharding.mesh == here


def _dtype(v: Var) -> Any:
    return getattr(v.aval, "dtype", None)


def _bytes(v: Var) -> int:
    return getattr(v.aval, "size", 0) * getattr(_dtype(v), "itemsize", 4)  # a key has none
