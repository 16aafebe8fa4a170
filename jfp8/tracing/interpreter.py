"""Run traced programs equation by equation, for a `Reader` that notes, replaces, emits and feeds.

All code of this library that reads or changes a program of JAX is such a reader. The interpreter
knows the primitives that have a body: calls, ``checkpoint``, ``scan``, ``while``, ``cond`` and
``shard_map``. A body runs in the same transformation as before, so that loops stay loops and what
``checkpoint`` computes again is computed again. A primitive whose body it does not know runs as
it is, and the reader is told (`Reader.closed_to`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var
from jax.sharding import PartitionSpec

from jfp8.tracing.compat import (
    bodies_of,
    body_of,
    evaluate,
    evaluate_with_body,
    jaxprs_of,
    manual_axes,
    policy_of,
    primitive_name,
    scan_sizes,
    scope_of,
    varying_axes,
)

CALLS = {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"}
RULES = {"custom_jvp_call", "custom_vjp_call"}


class Value(NamedTuple):
    """A value of a program, and what the reader notes of it."""

    array: Any
    note: Any = None


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
      path: the index of an equation, after the indices of the equations around it.
      stack: the named scopes around it.
      feeds: the values that the reader is fed there, by name.
      memo: for the reader's own use; another one in each body that JAX traces again, so that what
        is made in a body stays in it.
    """

    path: tuple[int, ...] = ()
    stack: str = ""
    feeds: Mapping[Any, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)

    def inside(self, i: int, eqn: Any = None) -> Place:
        """Return the place of the equation (or body) `i` inside this one."""
        stack = self.stack if eqn is None else f"{self.stack}/{eqn.source_info.name_stack}"
        return replace(self, path=(*self.path, i), stack=stack)


Emitted = list[tuple[Any, Any]]
"""Hashable keys, and the arrays that a program emits under them."""
Computed = tuple[Sequence[Value], Emitted] | None
"""The results of an equation and what it emits, or None for an equation that runs as it is."""


class Reader:
    """Say what is done with a program. The methods of this base read it and change nothing.

    Attributes:
      computes: False to follow notes alone: values are None, and nothing is computed.
      emits: whether `equation` may emit arrays.
      inlines_rules: whether functions with their own derivative are entered, which loses it.
    """

    computes = True
    emits = False
    inlines_rules = False

    def enters(self, eqn: Any, ins: Sequence[Value]) -> bool:
        """Return whether the bodies of an equation are read; if not, it runs as it is."""
        del eqn, ins
        return True

    def grouped(self, eqns: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """Return the equations of a program with these `results` as they are to run."""
        del results
        return eqns

    def equation(self, eqn: Any, ins: list[Value], at: Place) -> Computed:
        """Compute an equation in another way, or return None."""
        del eqn, ins, at
        return None

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: Place) -> Sequence[Value]:
        """Compute an equation of interest whose bodies the interpreter cannot enter."""
        del at
        return self.as_it_is(eqn, ins)

    def as_it_is(self, eqn: Any, ins: Sequence[Value]) -> list[Value]:
        """Compute an equation as the program does."""
        outs = evaluate(eqn, arrays(ins)) if self.computes else [None] * len(eqn.outvars)
        return list(map(Value, outs, self.flow(eqn, ins)))

    def constant(self, x: Any) -> Any:
        """Return the note of a literal, or of an array that the program holds."""
        del x
        return None

    def flow(self, eqn: Any, ins: Sequence[Value]) -> Sequence[Any]:
        """Return the notes of the results of an equation that runs as it is."""
        del ins
        return [None] * len(eqn.outvars)

    def policy(self, policy: Any) -> Any:
        """Return the policy of a ``checkpoint`` as it is to be, or None."""
        return policy

    def inner(self, notes: Sequence[Any]) -> list[Any]:
        """Return `notes` as they hold in a body that JAX traces again, whose values are others."""
        return list(notes)

    def in_loop(self, eqn: Any, notes: list[Any], at: Place, n_fixed: int, n: int) -> list[Any]:
        """Return the notes of an iteration's arguments.

        The first `n_fixed` are the same in each iteration, those up to `n` are carried, and the
        others are slices of what a ``scan`` runs over.
        """
        del eqn, at, n_fixed, n
        return notes

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[Any]:
        """Return the notes of an equation's results.

        Args:
          eqn: the equation.
          inside: the notes of its body's arguments.
          results: for each body the notes of its results.
        """
        del inside
        return results[0] if len(results[0]) == len(eqn.outvars) else [None] * len(eqn.outvars)

    def slices(self, name: Any, at: Place) -> bool:
        """Return whether the ``scan`` at this place slices the value that is fed as `name`."""
        del name, at
        return False

    def leave_scan(self, key: Any, x: Any, eqn: Any, at: Place) -> tuple[Hashable, Any]:
        """Return the key and the array of what a ``scan`` emitted, stacked along a new axis 0."""
        del eqn, at
        return key, x

    def merge(self, key: Any, stacked: Any) -> Any:
        """Merge what iterations emitted whose number is unknown, stacked along axis 0."""
        raise NotImplementedError

    def nothing(self, key: Any, like: Any) -> Any:
        """Return what a body emits that does not run, an array like `like`."""
        raise NotImplementedError

    def merge_devices(self, key: Any, x: Any, axes: tuple[Any, ...]) -> Any:
        """Merge what devices emitted along `axes` of a mesh."""
        raise NotImplementedError


def run(
    reader: Reader,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    ins: Iterable[Value],
    at: Place | None = None,
) -> tuple[list[Value], Emitted]:
    """Run a program for a `reader`: return its results, and all that it emits."""
    at = Place() if at is None else at
    constant = lambda x: Value(x, reader.constant(x))
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    known.update(zip(jaxpr.invars, ins, strict=True))
    eqns = reader.grouped(jaxpr.eqns, jaxpr.outvars)
    last = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if isinstance(v, Var)}
    last.update((v, len(eqns)) for v in jaxpr.outvars if isinstance(v, Var))
    read = lambda v: constant(v.val) if isinstance(v, Literal) else known[v]
    emitted: Emitted = []
    for i, eqn in enumerate(eqns):
        outs, more = _equation(reader, eqn, list(map(read, eqn.invars)), at.inside(i, eqn))
        emitted += more
        known.update(zip(eqn.outvars, outs, strict=True))
        for v in {v for v in eqn.invars if isinstance(v, Var) and last[v] == i}:
            del known[v]  # or everything that a program computes would stay alive to its end
    return list(map(read, jaxpr.outvars)), emitted


def _equation(
    reader: Reader, eqn: Any, ins: list[Value], at: Place
) -> tuple[Sequence[Value], Emitted]:
    computed = reader.equation(eqn, ins, at)
    if computed is not None:
        return computed
    if not list(jaxprs_of(eqn)) or not reader.enters(eqn, ins):
        return reader.as_it_is(eqn, ins), []
    return enter(reader, eqn, ins, at)


def enter(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> tuple[Sequence[Value], Emitted]:
    """Run the bodies of an equation, or tell the reader that they are not known."""
    runs = _RUNS.get(primitive_name(eqn))
    if runs is None and _may_be_inlined(reader, eqn):
        runs = inline
    if runs is None:
        return reader.closed_to(eqn, ins, at), []
    if not reader.computes:
        return _follow(reader, eqn, ins, at) if runs is not inline else inline(reader, eqn, ins, at)
    with scope_of(eqn):
        return runs(reader, eqn, ins, at)


def _may_be_inlined(reader: Reader, eqn: Any) -> bool:
    """Return whether a primitive that is not in `_RUNS` may be replaced by its only body."""
    if reader.computes and not (reader.inlines_rules and primitive_name(eqn) in RULES):
        return False
    bodies, sizes = list(jaxprs_of(eqn)), lambda x: (len(x.invars), len(x.outvars))
    return len(bodies) == 1 and sizes(bodies[0]) == sizes(eqn)


def inline(
    reader: Reader, eqn: Any, ins: Sequence[Value], at: Place
) -> tuple[list[Value], Emitted]:
    """Run an equation that calls one program once."""
    jaxpr, consts = body_of(eqn)
    if not reader.computes:
        return run(reader, jaxpr, consts, ins, at)
    into, out = (eqn.params.get(f"{way}_shardings", ()) for way in ("in", "out"))
    results, emitted = run(reader, jaxpr, consts, _constrained(ins, into), at)
    return _constrained(results, out), emitted


def _constrained(values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
    """Return `values` with the shardings that a ``jit`` was given for them, if any."""
    given = [s if isinstance(s, jax.sharding.Sharding) else None for s in shardings]
    pairs = zip(values, given or [None] * len(values), strict=True)
    return [v if s is None else v._replace(array=_held(v.array, s)) for v, s in pairs]


def _held(x: Any, sharding: Any) -> Any:
    """Return `x` with a sharding, which along explicit axes is a matter of types."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return (jax.sharding.reshard if explicit else lax.with_sharding_constraint)(x, sharding)


def _follow(
    reader: Reader, eqn: Any, ins: Sequence[Value], at: Place
) -> tuple[list[Value], Emitted]:
    """Follow notes through the bodies of an equation, each of which is read once."""
    notes, bodies = notes_in(ins), list(bodies_of(eqn))
    if eqn.primitive.name == "cond":
        notes = notes[1:]
    elif eqn.primitive.name == "scan":
        n_fixed, n_carry = scan_sizes(eqn)
        notes = reader.in_loop(eqn, notes, at, n_fixed, n_fixed + n_carry)
    elif eqn.primitive.name == "while":
        n_fixed, closed = eqn.params["body_nconsts"], eqn.params["body_jaxpr"]
        bodies = [(closed.jaxpr, closed.consts)]
        notes = notes[eqn.params["cond_nconsts"] :]
        notes = reader.in_loop(eqn, notes, at, n_fixed, len(notes))
    found = [
        run(reader, *body, without_arrays(notes), at if len(bodies) == 1 else at.inside(i))
        for i, body in enumerate(bodies)
    ]
    made = reader.after(eqn, notes, [notes_in(outs) for outs, _ in found])
    return without_arrays(made), [each for _, more in found for each in more]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Out:
    """Hold what a body that JAX traces returns: arrays, and in the structure the keys of some."""

    results: list[Any]
    emitted: list[Any]
    keys: tuple[Hashable, ...] = field(metadata={"static": True})

    def found(self, emitted: Sequence[Any] | None = None) -> Emitted:
        """Return keys, and the arrays that were emitted, or these."""
        return list(zip(self.keys, self.emitted if emitted is None else emitted, strict=True))


_NOTHING = _Out([], [], ())


class _Body:
    """A body that JAX traces again, as a function of arrays and of what is fed."""

    def __init__(self, reader: Reader, parts: Any, notes: Sequence[Any], at: Place) -> None:
        self.reader, (self.jaxpr, self.consts), self.notes, self.at = reader, parts, notes, at
        self.made: list[Any] = []

    def __call__(self, values: Sequence[Any], feeds: Mapping[Any, Any]) -> _Out:
        at, ins = replace(self.at, feeds=feeds, memo={}), map(Value, values, self.notes)
        outs, emitted = run(self.reader, self.jaxpr, self.consts, ins, at)
        self.made[:] = self.reader.inner(notes_in(outs))
        return _Out(arrays(outs), [x for _, x in emitted], tuple(key for key, _ in emitted))


def _after(reader: Reader, eqn: Any, outs: Sequence[Any], *bodies: _Body) -> list[Value]:
    made = reader.after(eqn, list(bodies[0].notes), [body.made for body in bodies])
    return [Value(x, note) for x, note in zip(outs, made, strict=True)]


def _checkpoint(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> Any:
    """Keep ``jax.checkpoint``, or XLA would store what is to be computed again."""
    body = _Body(reader, body_of(eqn), reader.inner(notes_in(ins)), at)
    policy = reader.policy(policy_of(eqn))
    out = evaluate_with_body(eqn, body, policy, arrays(ins), dict(at.feeds))
    return _after(reader, eqn, out.results, body), out.found()


def _scan(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> Any:
    n_fixed, n_carry = scan_sizes(eqn)
    n = n_fixed + n_carry
    fixed, carry, xs = (arrays(part) for part in (ins[:n_fixed], ins[n_fixed:n], ins[n:]))
    notes = reader.in_loop(eqn, reader.inner(notes_in(ins)), at, n_fixed, n)
    body = _Body(reader, body_of(eqn), notes, at)
    sliced = {name: x for name, x in at.feeds.items() if reader.slices(name, at)}

    def turn(carry: Any, xs: Any) -> Any:
        out = body([*fixed, *carry, *xs[0]], {**at.feeds, **xs[1]})
        return out.results[:n_carry], replace(out, results=out.results[n_carry:])

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, out = lax.scan(turn, carry, (xs, sliced), **options)
    emitted = [reader.leave_scan(key, x, eqn, at) for key, x in out.found()]
    return _after(reader, eqn, [*carry, *out.results], body), emitted


def _while(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> Any:
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    condition, closed, n_condition, n_fixed = (eqn.params[name] for name in names)
    n = n_condition + n_fixed
    parts = ins[:n_condition], ins[n_condition:n], ins[n:]
    for_condition, fixed, carry = map(arrays, parts)
    outside = reader.inner(notes_in(ins))
    notes = reader.in_loop(eqn, outside[n_condition:], at, n_fixed, n_fixed + len(carry))
    body = _Body(reader, (closed.jaxpr, closed.consts), notes, at.inside(1))
    tested = (condition.jaxpr, condition.consts)
    test = _Body(reader, tested, [*outside[:n_condition], *notes[n_fixed:]], at.inside(0))
    turn = lambda carry: body([*fixed, *carry], at.feeds)
    goes_on = lambda state: test([*for_condition, *state[0]], at.feeds).results[0]
    like = jax.eval_shape(turn, carry) if reader.emits else _NOTHING

    def again(state: Any) -> Any:
        out = turn(state[0])
        pairs = zip(out.keys, state[1], out.emitted, strict=True)
        return out.results, [reader.merge(key, jnp.stack([a, b])) for key, a, b in pairs]

    start = carry, [reader.nothing(key, x) for key, x in like.found()]
    carry, emitted = lax.while_loop(goes_on, again, start)
    return _after(reader, eqn, carry, body), like.found(emitted)


def _cond(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> Any:
    which, *operands = arrays(ins)
    notes, feeds, closed = reader.inner(notes_in(ins[1:])), dict(at.feeds), eqn.params["branches"]
    bodies = [_Body(reader, (b.jaxpr, b.consts), notes, at.inside(i)) for i, b in enumerate(closed)]
    shapes = lambda body: jax.eval_shape(body, operands, feeds) if reader.emits else _NOTHING
    every = list(map(shapes, bodies))

    def taken(i: int) -> Callable[..., Any]:
        def branch(operands: Any, feeds: Any) -> Any:
            out = bodies[i](operands, feeds)
            emitted = [[reader.nothing(key, x) for key, x in like.found()] for like in every]
            emitted[i] = out.emitted
            return out.results, emitted

        return branch

    runs = [taken(i) for i in range(len(bodies))]
    outs, emitted = lax.switch(jnp.asarray(which, jnp.int32), runs, operands, feeds)
    keys = [key for like in every for key in like.keys]
    found = list(zip(keys, itertools.chain(*emitted), strict=True))
    return _after(reader, eqn, outs, *bodies), found


def _shard_map(reader: Reader, eqn: Any, ins: list[Value], at: Place) -> Any:
    params, axes = eqn.params, manual_axes(eqn)
    body = _Body(reader, body_of(eqn), reader.inner(notes_in(ins)), at)

    def on_device(values: Any, feeds: Any) -> Any:
        out = body(values, feeds)
        # All axes, if JAX does not keep track of those that an array varies over.
        over = lambda x: tuple(a for a in axes if not params["check_vma"] or a in varying_axes(x))
        merged = [reader.merge_devices(key, x, over(x)) for key, x in out.found()]
        return out.results, replace(out, results=[], emitted=merged)

    results, out = jax.shard_map(
        on_device,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), PartitionSpec()),
        out_specs=(list(params["out_specs"]), PartitionSpec()),
        axis_names=axes,
        check_vma=params["check_vma"],
    )(arrays(ins), dict(at.feeds))
    return _after(reader, eqn, results, body), out.found()


_RUNS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(CALLS, inline),
    "checkpoint": _checkpoint,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


def arrays(values: Iterable[Value]) -> list[Any]:
    """Return the arrays of `values`."""
    return [value.array for value in values]


def notes_in(values: Iterable[Value]) -> list[Any]:
    """Return the notes of `values`."""
    return [value.note for value in values]


def without_arrays(notes: Iterable[Any]) -> list[Value]:
    """Return values without arrays, for a reader that follows notes alone."""
    return [Value(None, note) for note in notes]


def equations(
    jaxpr: Jaxpr,
    stack: str = "",
    times: int = 1,
    *,
    enters: Callable[[Any, str], bool] = lambda *_: True,
    branches: bool = True,
) -> Iterator[tuple[Any, str, int]]:
    """List the equations of a program, and of all bodies in it, in their order.

    Args:
      jaxpr: the program.
      stack: the named scopes around it.
      times: how often it runs.
      enters: whether the bodies of an equation, in these scopes, are listed.
      branches: False to list only the first branch of each ``cond``.

    Returns:
      ``(eqn, stack, times)``: an equation, before what is inside it; the named scopes around it;
      and how often it runs, if it runs at all, in loops of known lengths.
    """
    for eqn in jaxpr.eqns:
        here, name = f"{stack}/{eqn.source_info.name_stack}", eqn.primitive.name
        yield eqn, here, times
        if enters(eqn, here):
            inner = times * (eqn.params["length"] if name == "scan" else 1)
            bodies = list(jaxprs_of(eqn))[: None if branches or name != "cond" else 1]
            for body in bodies:
                yield from equations(body, here, inner, enters=enters, branches=branches)
