"""The matmuls of a jaxpr: how many have FP8 operands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax.extend import core

PRODUCTS = ("dot_general", "ragged_dot_general", "ragged_dot")


def products(jaxpr: core.Jaxpr) -> Counter[tuple[bool, tuple[int, ...], tuple[int, ...]]]:
    """Count each matmul by its shapes, and by True if both operands were FP8 numbers.

    An operand was FP8 if FP8 numbers went into it, except through a matmul: with their scales,
    or decoded from their bits. A matmul in a loop, or in a stack of layers that is scanned, counts
    once. Of branches, such as those for several platforms, the one with the most matmuls in FP8
    counts.
    """
    found: Counter[Any] = Counter()
    _visit(jaxpr, [False] * len(jaxpr.invars), found)
    return found


def _visit(jaxpr: core.Jaxpr, given: list[bool], found: Counter[Any]) -> list[bool]:
    """Return the results of `jaxpr` computed from FP8 numbers, if `given` inputs are FP8."""
    in_fp8 = dict(zip(jaxpr.invars, given, strict=True))
    is_fp8 = lambda v: not isinstance(v, core.Literal) and (in_fp8.get(v, False) or _stored(v))
    for eqn in jaxpr.eqns:
        operands = [is_fp8(v) for v in eqn.invars]
        results = [False] * len(eqn.outvars)
        inner = _inner(eqn)
        if eqn.primitive.name in PRODUCTS:
            found[(all(operands[:2]), *(v.aval.shape for v in eqn.invars[:2]))] += 1
        elif not inner:
            results = [any(operands)] * len(results)
        branches = []
        for body in inner:
            known = operands[len(operands) - len(body.invars) :] if body.invars else []
            branches.append(Counter())
            inside = _visit(body, [False] * (len(body.invars) - len(known)) + known, branches[-1])
            if len(inside) == len(results):
                results = [a or b for a, b in zip(results, inside, strict=True)]
        if eqn.primitive.name == "cond":
            branches = [max(branches, key=in_both)]
        for branch in branches:
            found.update(branch)
        in_fp8 |= dict(zip(eqn.outvars, results, strict=True))
    return [is_fp8(v) for v in jaxpr.outvars]


def in_both(found: Counter[Any]) -> int:
    """Count the matmuls with two FP8 operands."""
    return sum(n for (fp8, *_), n in found.items() if fp8)


def _stored(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def _inner(eqn: Any) -> list[core.Jaxpr]:
    """Yield the jaxprs among the parameters of an equation."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    values = [getattr(v, "jaxpr", v) for v in values]
    return [v for v in values if isinstance(v, core.Jaxpr)]
