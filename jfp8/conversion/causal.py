"""Recognise causal models, which mask later positions, by their jaxprs.

A program is taken for one if it compares positions with positions, has a triangular constant, or
computes causal attention in FP8. Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jfp8.conversion.attention_rows import is_attention
from jfp8.products.flash.passes import read_name
from jfp8.tracing import interpreter
from jfp8.tracing.compat import bodies_of
from jfp8.tracing.interpreter import Computed, Reader, Value, notes_in, without_arrays

_ORDERS = {"ge", "gt", "le", "lt"}
# Operations for which we know along which dimensions their results vary, given data-free operands.
_ELEMENTWISE = {"add", "sub", "mul", "neg", "max", "min", "convert_element_type", "copy"}
_LARGEST = 1 << 24  # largest constant that is examined, in elements

# The dimensions along which an array that depends on no data varies; None: it depends on data.
_Varies = frozenset[int] | None


def masks_later_positions(closed: ClosedJaxpr, inputs: Any = ()) -> bool:
    """Tell whether `closed`, the jaxpr of a model, or one of its `inputs` has a causal mask."""
    if any(map(_is_triangular, [*closed.consts, *jax.tree.leaves(inputs)])):
        return True
    reader = _Positions()
    ins = without_arrays([None] * len(closed.jaxpr.invars))
    interpreter.run(reader, closed.jaxpr, closed.consts, ins)
    return any(reader.found)


def _is_triangular(x: Any) -> bool:
    """Tell whether `x` is a mask, or masks, each row of which allows one column more."""
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, jax.core.Tracer):
        return False
    there = not isinstance(x, jax.Array) or x.is_fully_addressable
    if not there or x.ndim < 2 or not 1 < x.shape[-2] <= x.shape[-1] or not x.size:
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or math.prod(x.shape[-2:]) > _LARGEST:
        return False
    with jax.ensure_compile_time_eval():  # under a trace a part of an array would be traced
        one = np.asarray(x[(0,) * (x.ndim - 2)])
    rows, columns = one.shape
    triangle = np.tri(rows, columns, columns - rows, dtype=bool)
    return len(np.unique(one)) == 2 and bool(np.array_equal(one == one.max(), triangle))


class _Positions(Reader):
    """Note how values vary, and find comparisons of positions along two dimensions."""

    computes = False

    def __init__(self) -> None:
        self.found: list[bool] = []  # for each comparison and attention whether it is causal

    def constant(self, x: Any) -> _Varies:
        return None if np.ndim(x) else frozenset()  # arrays are looked at above

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Computed:
        if not is_attention(eqn):  # its own comparisons, in loops, do not count
            return None
        self.found.append(read_name(eqn.params["name"]).is_causal)
        return without_arrays([None] * len(eqn.outvars)), []

    def flow(self, eqn: Any, ins: Sequence[Value]) -> list[_Varies]:
        given = notes_in(ins)
        if eqn.primitive.name in _ORDERS and all(given):
            self.found.append(given[0].isdisjoint(given[1]))
        return [_varies(eqn, given)] * len(eqn.outvars)

    def in_loop(self, eqn: Any, notes: list[Any], at: Any, n_fixed: int, n: int) -> list[_Varies]:
        """Drop the first dimension of slices; carried values vary as they do at the start."""
        inner = lambda varies: None if varies is None else frozenset(d - 1 for d in varies if d)
        return [*notes[:n], *map(inner, notes[n:])]

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[_Varies]:
        is_loop = eqn.primitive.name in ("scan", "while", "cond")
        return [None] * len(eqn.outvars) if is_loop else super().after(eqn, inside, results)

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: Any) -> list[Value]:
        """Look for comparisons inside a kernel or the like."""
        for i, (jaxpr, consts) in enumerate(bodies_of(eqn)):
            unknown = without_arrays([None] * len(jaxpr.invars))
            interpreter.run(self, jaxpr, consts, unknown, at.inside(i))
        return without_arrays([None] * len(eqn.outvars))


def _varies(eqn: Any, given: list[_Varies]) -> _Varies:
    """Return the dimensions along which a result varies, or None if they depend on data."""
    name = eqn.primitive.name
    if name == "iota":
        return frozenset((eqn.params["dimension"],))
    if not given or None in given:
        return None
    first, *rest = (varies or frozenset() for varies in given)
    if name in _ELEMENTWISE:
        return first.union(*rest)
    places = _places(name, eqn)
    return None if places is None else frozenset(places[d] for d in first if d in places)


def _places(name: str, eqn: Any) -> dict[int, int] | None:
    """Map the dimensions of an operand to the result's, or return None if this is unknown."""
    if name == "broadcast_in_dim":
        return dict(enumerate(eqn.params["broadcast_dimensions"]))
    if name == "transpose":
        return {d: i for i, d in enumerate(eqn.params["permutation"])}
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
    left, right = ([d for d, n in enumerate(shape) if n > 1] for shape in (before, after))
    same = [before[d] for d in left] == [after[d] for d in right]
    return dict(zip(left, right)) if name in ("reshape", "squeeze") and same else None
