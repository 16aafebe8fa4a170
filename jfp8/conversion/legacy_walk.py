"""Walk through a traced program, and replace its matmuls with weights.

`walk` computes a jaxpr equation by equation and follows each weight through casts, transposes,
slices and the like, into ``jit``, ``scan``, ``while``, ``cond``, ``checkpoint`` and ``shard_map``.
A matmul of such a weight and something else goes to a function, which computes it in another way.
What runs inside a function with its own derivative (``custom_jvp``, ``custom_vjp``) is left
alone: its derivative belongs to what it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal

from jfp8.conversion.legacy_matmul import Place, Source, WeightMatmul, is_ordinary
from jfp8.conversion.weight_matmul import PRODUCTS
from jfp8.tracing.compat import body_of, evaluate, jaxprs_of, manual_axes, scan_sizes
from jfp8.tracing.notes import note

_CUTS = {"dynamic_slice", "slice", "split", "unstack"}
SAME = _CUTS | {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "mesh_cast",
    "name",
    "pvary",
    "reduce_precision",
    "reshape",
    "reshard",
    "rev",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
    "transpose",
}
"""What gives the same numbers, or some of them, in another order or dtype."""

JOINED = {"all_gather", "all_gather_invariant", "concatenate"}  # of parts of one, or of several
_MOVED = SAME | JOINED | {"copy_p", "gather", "optimization_barrier", "pad"}
_NO_WEIGHT = (
    "no operand is a weight, or made of one by casts, slices and the like (attention=True converts "
    "matmuls of two activations)"
)
_TWO_WEIGHTS = "both operands are weights"
_CALLS = {"jit", "pjit", "closed_call", "core_call"}


@dataclass(frozen=True)
class Walk:
    """Say what a walk does at each matmul."""

    compute: Callable[[WeightMatmul], jax.Array]
    loops: Mapping[str, Sequence[Place]]  # by the name of a state, the scans that slice it
    of_activations: bool = False  # matmuls without a weight go to `compute`, too

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        values: Sequence[Any],
        sources: Sequence[Source | None],
        states: Mapping[str, jax.Array],
        place: Place = (),
    ) -> tuple[list[Any], list[Source | None]]:
        """Compute the body `jaxpr` of the equation at `place`.

        Returns its results and what they were made of; `sources` say the same of the arguments.
        """
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, values, strict=True))
        made: dict[Any, Source | None] = dict(zip(jaxpr.invars, sources, strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else known[v]
        source = lambda v: None if isinstance(v, Literal) else made.get(v)
        for i, eqn in enumerate(jaxpr.eqns):
            arguments = [read(v) for v in eqn.invars], [source(v) for v in eqn.invars]
            results, new = self._equation(eqn, *arguments, states, (*place, i))
            known.update(zip(eqn.outvars, results, strict=True))
            made.update(zip(eqn.outvars, new, strict=True))
        return [read(v) for v in jaxpr.outvars], [source(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
        name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
        if name in PRODUCTS:
            matmul = self._matmul(eqn, values, sources, states)
            if matmul is None:
                with note("reason", _TWO_WEIGHTS if all(sources[:2]) else _NO_WEIGHT):
                    return evaluate(eqn, values), nothing
            with _scope_of(eqn):
                return [self.compute(matmul)], nothing
        bodies = list(jaxprs_of(eqn))
        if not bodies:
            return evaluate(eqn, values), _moved(eqn, values, sources)
        rewrite = _REWRITERS.get(name)
        moves = name in _CALLS and any(sources)  # such as jnp.take
        concerned = any(map(_has_product, bodies)) and (self.of_activations or any(sources))
        if not moves and not concerned:
            return evaluate(eqn, values), nothing
        if rewrite is None:
            with note("reason", f"inside {name}, which has a derivative of its own"):
                return evaluate(eqn, values), nothing
        with _scope_of(eqn):
            return rewrite(self, eqn, values, sources, states, place)

    def _matmul(self, eqn: Any, values: Any, sources: Any, states: Any) -> WeightMatmul | None:
        """Return the matmul that `compute` gets; None for others."""
        (x, weight, *others), (lhs, rhs) = values, sources[:2]
        if not is_ordinary(eqn, x, weight):
            return None
        if lhs and rhs and lhs.gathered != rhs.gathered:  # rows of an embedding are activations
            lhs, rhs = (None, rhs) if lhs.gathered else (lhs, None)
        swapped = lhs is not None and eqn.primitive.name == "dot_general"
        if swapped:
            x, weight, lhs, rhs = weight, x, rhs, lhs
        is_weight = rhs is not None and lhs is None and np.ndim(weight) >= 2
        if not is_weight and (not self.of_activations or lhs or rhs):
            return None
        return WeightMatmul(rhs or Source(""), eqn, x, weight, swapped, tuple(others), states)


def _has_product(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in PRODUCTS or any(map(_has_product, jaxprs_of(eqn)))
        for eqn in jaxpr.eqns
    )


@contextlib.contextmanager
def _scope_of(eqn: Any) -> Any:
    """Return the context of an equation: its mesh and its named scope."""
    name = str(eqn.source_info.name_stack)
    with eqn.ctx.manager, jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def _moved(eqn: Any, values: Any, sources: Any) -> list[Source | None]:
    """Return what the results of an equation without a body were made of."""
    name = eqn.primitive.name
    nothing: list[Source | None] = [None] * len(eqn.outvars)
    if name in ("mul", "div"):  # by a number, which a scale makes good
        source = next(iter(filter(None, sources)), None)
        same = source is not None and sorted(map(np.size, values))[0] == 1
        return [replace(source, in_f32=None) if same else None]
    if name not in _MOVED or not sources:
        return nothing
    if name == "optimization_barrier":
        return list(sources)
    if name == "concatenate":
        return [_joined(sources)]
    if sources[0] is None:
        return nothing
    if name == "convert_element_type":
        return [_cast(sources[0], values[0], eqn.outvars[0].aval.dtype)]
    if name == "broadcast_in_dim" and eqn.outvars[0].aval.size > np.size(values[0]):
        return nothing  # what is repeated is an activation, such as queries that are learned
    return _view(eqn, values, sources[0])


def _joined(sources: Sequence[Source | None]) -> Source | None:
    found = [source for source in sources if source is not None]
    if len(found) < len(sources):
        return None
    path = "+".join(dict.fromkeys(source.path for source in found))
    return replace(found[0], path=path, in_f32=None)


def _cast(source: Source, value: Any, dtype: np.dtype) -> Source | None:
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    narrower = jnp.result_type(value) == jnp.float32 and dtype.itemsize < 4
    return replace(source, in_f32=value if narrower else None)


def _view(eqn: Any, values: Any, source: Source) -> list[Source | None]:
    """Return the sources of an array in another form, or of parts of it."""
    name, outs = eqn.primitive.name, eqn.outvars
    indices = [v.val for v in eqn.invars[1:] if isinstance(v, Literal)]
    is_computed = name == "dynamic_slice" and len(indices) < len(eqn.invars) - 1
    views: list[Source | None] = [source] * len(outs)
    if name == "gather":
        views = [replace(source, gathered=True)]
    elif name in _CUTS and not is_computed:
        starts = eqn.params.get("start_indices", tuple(map(int, indices)))
        parts = [(*source.parts, (name, starts, i, v.aval.shape)) for i, v in enumerate(outs)]
        views = [replace(source, parts=part) for part in parts]
    wide: list[Any] = [None] * len(outs)
    if source.in_f32 is not None and name != "pad":
        wide = evaluate(eqn, [source.in_f32, *values[1:]])  # not computed where nobody reads it
    return [replace(view, in_f32=x) for view, x in zip(views, wide, strict=True) if view]


def _call(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    jaxpr, consts = body_of(eqn)
    ins, outs = (eqn.params.get(f"{way}_shardings", ()) for way in ("in", "out"))
    results, made = walk.run(jaxpr, consts, _constrained(values, ins), sources, states, place)
    return _constrained(results, outs), made


def _constrained(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Return `values` with the shardings that a ``jit`` was given for them, if any."""
    given = [s if isinstance(s, jax.sharding.Sharding) else None for s in shardings]
    pairs = zip(values, given or [None] * len(values), strict=True)
    return [x if s is None else lax.with_sharding_constraint(x, s) for x, s in pairs]


def _inner(sources: Sequence[Source | None]) -> list[Source | None]:
    """Return `sources` without values, which would leave their trace."""
    return [None if source is None else replace(source, in_f32=None) for source in sources]


def _checkpoint(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    jaxpr, consts = body_of(eqn)
    made: list[Any] = []

    def body(values: Any, states: Any) -> Any:
        results, new = walk.run(jaxpr, consts, values, _inner(sources), states, place)
        made[:] = _inner(new)
        return results

    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(list(values), states), made


def _scan(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    jaxpr, consts = body_of(eqn)
    n_consts, n_carry = scan_sizes(eqn)
    length = eqn.params["length"]
    n = n_consts + n_carry
    fixed, carry, xs = values[:n_consts], values[n_consts:n], values[n:]
    outside = _inner(sources)
    carried = _carried(jaxpr, outside[n_consts:n], n_consts)
    into = lambda source: source and replace(source, loops=(*source.loops, (place, length)))
    inside = [*outside[:n_consts], *carried, *map(into, outside[n:])]
    sliced = {name: x for name, x in states.items() if place in walk.loops[name]}
    shared = {name: x for name, x in states.items() if name not in sliced}

    def body(carry: Any, turn: Any) -> Any:
        xs, sliced = turn
        arguments = [*fixed, *carry, *xs]
        here = {**shared, **sliced}
        results, _ = walk.run(jaxpr, consts, arguments, inside, here, place)
        return results[:n_carry], results[n_carry:]

    options = {"length": length, "reverse": eqn.params["reverse"], "unroll": eqn.params["unroll"]}
    carry, ys = lax.scan(body, list(carry), (list(xs), sliced), **options)
    return [*carry, *ys], [*carried, *[None] * len(ys)]


def _carried(jaxpr: Jaxpr, sources: Sequence[Any], start: int) -> list[Source | None]:
    """Return the sources of what a loop carries, of values that it does not change."""
    ins = jaxpr.invars[start : start + len(sources)]
    outs = jaxpr.outvars[: len(sources)]
    return [source if v is w else None for source, v, w in zip(sources, ins, outs, strict=True)]


def _while(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    condition, body, n_condition, n_body = (eqn.params[name] for name in names)
    n = n_condition + n_body
    for_condition, for_body, carry = values[:n_condition], values[n_condition:n], values[n:]
    outside = _inner(sources)
    carried = _carried(body.jaxpr, outside[n:], n_body)
    inside = [*outside[n_condition:n], *carried]

    def turn(carry: Any) -> Any:
        arguments = [*for_body, *carry]
        return walk.run(body.jaxpr, body.consts, arguments, inside, states, (*place, 1))[0]

    def goes_on(carry: Any) -> Any:
        arguments, given = [*for_condition, *carry], [*outside[:n_condition], *carried]
        jaxpr, consts = condition.jaxpr, condition.consts
        return walk.run(jaxpr, consts, arguments, given, states, (*place, 0))[0][0]

    return lax.while_loop(goes_on, turn, list(carry)), carried


def _cond(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    which, *operands = values
    inside = _inner(sources[1:])

    def branch(i: int, closed: Any) -> Callable[..., Any]:
        arguments = closed.jaxpr, closed.consts
        return lambda values, states: walk.run(*arguments, values, inside, states, (*place, i))[0]

    branches = [branch(i, closed) for i, closed in enumerate(eqn.params["branches"])]
    results = lax.switch(jnp.asarray(which, jnp.int32), branches, operands, dict(states))
    return results, [None] * len(eqn.outvars)


def _shard_map(walk: Walk, eqn: Any, values: Any, sources: Any, states: Any, place: Place) -> Any:
    jaxpr, consts = body_of(eqn)
    inside = _inner(sources)

    def body(values: Any, states: Any) -> Any:
        return walk.run(jaxpr, consts, values, inside, states, place)[0]

    params = eqn.params
    run = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), jax.sharding.PartitionSpec()),
        out_specs=list(params["out_specs"]),
        axis_names=manual_axes(eqn),
        check_vma=params["check_vma"],
    )
    return run(list(values), dict(states)), [None] * len(eqn.outvars)


def is_entered(primitive: Any) -> bool:
    """Tell whether a walk enters the bodies of this primitive."""
    return primitive.name in _REWRITERS


_REWRITERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_CALLS, _call),
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
