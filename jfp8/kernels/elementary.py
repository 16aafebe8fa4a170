"""Inline functions into elementary arithmetic, for compilers that support nothing else.

A function may have a custom rule for differentiation, and gradients are added up by a separate
operation. The compiler of kernels supports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jfp8.tracing import interpreter
from jfp8.tracing.compat import primitive_name, without_dead_code
from jfp8.tracing.interpreter import CALLS, RULES, Computed, Reader, Value


def elementary(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` of arrays, with the same values; its custom derivative is lost."""

    def run(*arrays: jax.Array) -> Any:
        closed, result = jax.make_jaxpr(f, return_shape=True)(*arrays)
        closed = without_dead_code(closed)
        outs, _ = interpreter.run(_Inliner(), closed.jaxpr, closed.consts, map(Value, arrays))
        return jax.tree.unflatten(jax.tree.structure(result), interpreter.arrays(outs))

    return run


class _Inliner(Reader):
    """Inline calls and functions with a rule. Loops, whose bodies run more than once, stay."""

    inlines_rules = True

    def enters(self, eqn: Any, ins: Sequence[Value]) -> bool:
        return primitive_name(eqn) in CALLS | RULES

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Computed:
        if eqn.primitive.name != "add_any":
            return None
        return [Value(ins[0].array + ins[1].array)], []
