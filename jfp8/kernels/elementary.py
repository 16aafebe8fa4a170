"""Inline functions into elementary arithmetic, for compilers that support nothing else.

A function may have a custom rule for differentiation, and gradients are added up by a separate
operation. The compiler of kernels supports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from jfp8.tracing.compat import evaluate, without_dead_code


def elementary(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` of arrays, with the same values; its custom derivative is lost."""

    def run(*arrays: jax.Array) -> Any:
        closed, result = jax.make_jaxpr(f, return_shape=True)(*arrays)
        closed = without_dead_code(closed)
        found = _evaluated(closed.jaxpr, closed.consts, arrays)
        return jax.tree.unflatten(jax.tree.structure(result), found)

    return run


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True)
    )
    value_of = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        inputs = [value_of(atom) for atom in eqn.invars]
        # A loop has a "jaxpr", too, which runs more than once: it stays unchanged.
        body = eqn.params.get("jaxpr" if eqn.primitive.name == "jit" else "call_jaxpr")
        if body is not None:  # jit, or a function with a rule
            results = _evaluated(body.jaxpr, body.consts, inputs)
        elif eqn.primitive.name == "add_any":
            results = [inputs[0] + inputs[1]]
        else:
            results = evaluate(eqn, inputs)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]
