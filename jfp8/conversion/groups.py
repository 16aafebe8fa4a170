"""Group what a program computes between its matmuls, by the values that it is computed for.

A group is the largest set of cheap equations from which only one of them is read by others: an
activation function, or a normalization. It can be computed again from its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var
from jax.extend.core.primitives import closed_call_p

from jfp8.tracing.compat import body_of, called, evaluate, jaxprs_of, primitive_name
from jfp8.tracing.interpreter import CALLS, Reader, Value, arrays, equations, run

GROUP = closed_call_p.name
"""The primitive that calls a group."""

VIEWS = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "pvary"}
VIEWS |= {"reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose", "unstack"}
_IN_KERNELS = """
    abs add clamp convert_element_type copy cos div eq erf exp exp2 ge gt integer_pow le log log1p
    logistic lt max min mul ne neg rsqrt select_n sign sin sqrt square stop_gradient sub tanh
"""
ELEMENTWISE = {*_IN_KERNELS.split()}
"""Primitives that kernels know, by which each element is computed from elements at its place."""
_OTHERS = """
    add_any and cbrt ceil concatenate cosh erfc expm1 floor iota is_finite not or pad pow reduce_max
    reduce_min reduce_precision reduce_sum rem round sinh tan xor
"""
CHEAP = VIEWS | ELEMENTWISE | {*_OTHERS.split()}
"""Primitives that read their operands once, and cost little more than that."""
_CALLS = CALLS | {"custom_jvp_call"}


def is_cheap(eqn: Any) -> bool:
    """Return whether an equation, with all in its bodies, is cheap and has no effect."""
    bodies = list(jaxprs_of(eqn))
    if eqn.effects or not bodies:
        return not eqn.effects and primitive_name(eqn) in CHEAP
    inner = (x for body in bodies for x, _, _ in equations(body, enters=lambda *_: False))
    return primitive_name(eqn) in _CALLS and all(map(is_cheap, inner))


def grouped(equations: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """Return the equations of a program with these `results`; one call has each group."""
    readers: dict[Any, set[int]] = {v: {-1} for v in results if isinstance(v, Var)}
    groups: dict[int, list[Any]] = {}  # by the index of the last equation
    for i, eqn in reversed(list(enumerate(equations))):
        into = {last for v in eqn.outvars for last in readers.get(v, ())}
        last = into.pop() if len(into) == 1 and is_cheap(eqn) else i
        last = last if last in groups and is_cheap(groups[last][-1]) else i
        groups.setdefault(last, []).insert(0, eqn)
        for v in eqn.invars:
            if isinstance(v, Var):
                readers.setdefault(v, set()).add(last)
    if len(groups) == 1:  # the body of a group
        return list(equations)
    calls = lambda eqns: any(primitive_name(x) not in VIEWS for x in eqns) and is_cheap(eqns[-1])
    return [
        x for _, eqns in sorted(groups.items()) for x in ([called(eqns)] if calls(eqns) else eqns)
    ]


def saves_less(f: Callable[..., Any], *inputs: jax.Array) -> bool:
    """Return whether `inputs` have fewer bytes than the backward pass of ``f(*inputs)`` reads."""
    size = lambda x: np.prod(x.shape) * jnp.result_type(x).itemsize
    saved = jax.eval_shape(lambda *inputs: jax.vjp(f, *inputs)[1], *inputs)
    return sum(map(size, inputs)) < sum(map(size, jax.tree.leaves(saved)))


@dataclass(frozen=True)
class Elementwise(Reader):
    """A group as a function of f32 arrays of any shape; it rounds its result alone.

    So does XLA on a GPU, which by default keeps the excess precision of what it fuses.
    """

    inlines_rules = True
    text: str
    body: Jaxpr = field(compare=False, repr=False)

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Return the only result of the group."""
        outs, _ = run(self, self.body, (), map(Value, inputs))
        return outs[0].array

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Any:
        """Compute everything in f32, and numbers that were broadcast as numbers."""
        del at
        if any(jaxprs_of(eqn)):
            return None
        wide = lambda x, dtype: x.astype(
            jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype
        )
        given = [wide(jnp.asarray(x), x.dtype) for x in arrays(ins)]
        if eqn.primitive.name in VIEWS:  # to another dtype, or of a number
            return [Value(wide(given[0], eqn.outvars[0].aval.dtype))], []
        return list(map(Value, evaluate(eqn, jnp.broadcast_arrays(*given)))), []


def elementwise(call: Any) -> Elementwise | None:
    """Return a group as a function, if kernels may compute it; its inputs are all alike."""
    body, _ = body_of(call)
    avals = [v.aval for v in (*call.invars, *call.outvars)]
    alike = len(call.outvars) == 1 and len({(x.shape, x.dtype) for x in avals}) == 1
    if not alike or avals[0].dtype.itemsize != 2:
        return None
    of_number = lambda x: x.primitive.name == "broadcast_in_dim" and not x.invars[0].aval.shape
    fits = lambda x: x.primitive.name in ELEMENTWISE or of_number(x) or any(jaxprs_of(x))
    # Excess precision is for what XLA rounds between; a cast to another float is the user's.
    known = (avals[0].dtype, jnp.float32)
    others = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in known
    rounds = lambda x: any(others(v.aval) for v in x.outvars)
    is_known = all(fits(x) and not rounds(x) for x, _, _ in equations(body))
    return Elementwise(" ".join(str(body).split()), body) if is_known else None
