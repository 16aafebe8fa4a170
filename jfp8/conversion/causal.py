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
from jfp8.tracing.interpreter import Computed, Reader, Value, notes_in, without_arrays

_ORDERS = {"ge", "gt", "le", "lt"}
# Operations whose results are positions if their operands are.
_FOLLOWED = {"add", "sub", "mul", "neg", "max", "min", "convert_element_type", "copy"}
_FOLLOWED |= {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_LARGEST = 1 << 24  # largest constant that is examined, in elements


def masks_later_positions(closed: ClosedJaxpr, inputs: Any = ()) -> bool:
    """Tell whether `closed`, the jaxpr of a model, or one of its `inputs` has a causal mask."""
    if any(map(_is_triangular, [*closed.consts, *jax.tree.leaves(inputs)])):
        return True
    reader = _Positions()
    ins = without_arrays([None] * len(closed.jaxpr.invars))
    interpreter.run(reader, closed.jaxpr, closed.consts, ins)
    return any(reader.found)


def _is_triangular(x: Any) -> bool:
    """Tell whether `x` is a mask, or masks, each row of which allows one column more.

    A window may leave out the first columns, but not the last two before the mask begins.
    """
    if not _is_here(x) or x.ndim < 2 or not 1 < x.shape[-2] <= x.shape[-1] or not x.size:
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or math.prod(x.shape[-2:]) > _LARGEST:
        return False
    with jax.ensure_compile_time_eval():  # under a trace a part of an array would be traced
        one = np.asarray(x[(0,) * (x.ndim - 2)])
    rows, columns = one.shape
    allowed, last = one == one.max(), columns - rows
    triangle, before = (np.tri(rows, columns, k, dtype=bool) for k in (last, last - 2))
    is_mask = len(np.unique(one)) == 2 and not allowed[~triangle].any()
    return bool(is_mask and allowed[triangle & ~before].all())


def _counts(x: Any) -> bool | None:
    """Return True for an array that counts along its only axis, as ``np.arange`` does."""
    if not _is_here(x) or not jnp.issubdtype(x.dtype, jnp.number):
        return None
    has_one_axis = 1 < x.size == max(x.shape)
    return True if has_one_axis and (np.diff(np.ravel(x)) == 1).all() else None


def _is_here(x: Any) -> bool:
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


class _Positions(Reader):
    """Find comparisons of positions with positions.

    The note of a value is True for positions, or what was computed from positions and numbers;
    False for other numbers that depend on no data; and None for everything else.
    """

    computes = False

    def __init__(self) -> None:
        self.found: list[bool] = []  # for each comparison and attention whether it is causal

    def constant(self, x: Any) -> bool | None:
        return _counts(x) if np.ndim(x) else False  # other arrays are looked at above

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Computed:
        if not is_attention(eqn):  # its own comparisons, in loops, do not count
            return None
        self.found.append(read_name(eqn.params["name"]).is_causal)
        return without_arrays([None] * len(eqn.outvars)), []

    def flow(self, eqn: Any, ins: Sequence[Value]) -> list[bool | None]:
        """Note positions; a single one, such as a loop's counter, is a number like others."""
        notes, name = notes_in(ins), eqn.primitive.name
        positions = [x and v.aval.size > 1 for x, v in zip(notes, eqn.invars, strict=True)]
        if name in _ORDERS:
            self.found.append(all(positions))
        if name == "iota":
            return [True]
        known = name in _FOLLOWED and None not in notes
        return [any(positions) if known else None] * len(eqn.outvars)
