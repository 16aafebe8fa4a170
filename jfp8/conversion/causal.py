"""Recognise causal models, which mask later positions, by their jaxprs.

A program is taken for one if it compares positions with positions, has a triangular constant, or
computes causal attention in FP8. Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jfp8.conversion.attention_rows import is_attention
from jfp8.conversion.edges import jaxprs_of
from jfp8.products.flash.passes import read_name

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
    jaxpr = closed.jaxpr
    return _compares(jaxpr, [None] * len(jaxpr.invars))[0]


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


def _compares(jaxpr: Jaxpr, ins: Iterable[_Varies]) -> tuple[bool, list[_Varies]]:
    """Tell whether `jaxpr` compares positions along two dimensions, and how its results vary."""
    known: dict[Any, _Varies] = dict(zip(jaxpr.invars, ins, strict=True))
    read = lambda v: frozenset() if isinstance(v, Literal) else known.get(v)
    for eqn in jaxpr.eqns:
        found, made = _compares_here(eqn, [read(v) for v in eqn.invars])
        if found:
            return True, []
        known.update(zip(eqn.outvars, made))
    return False, [read(v) for v in jaxpr.outvars]


def _compares_here(eqn: Any, given: list[_Varies]) -> tuple[bool, list[_Varies]]:
    made: list[_Varies] = [None] * len(eqn.outvars)
    if is_attention(eqn):  # whose own comparisons, in loops or a kernel, are of no interest
        return read_name(eqn.params["name"]).is_causal, made
    if eqn.primitive.name in _ORDERS and None not in given:
        first, second = given
        if first and second and not first & second:
            return True, []
    bodies = list(jaxprs_of(eqn))
    if not bodies:
        return False, [_varies(eqn, given)]
    for body in bodies:
        same = len(bodies) == 1 and len(body.invars) == len(given)
        found, inside = _compares(body, given if same else [None] * len(body.invars))
        if found:
            return True, []
        if same and len(inside) == len(made) and eqn.primitive.name != "scan":
            made = inside
    return False, made


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
