"""Express an einsum of two operands as one ``dot_general``."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.scaling.arrays import ScaledArray


@dataclass(frozen=True)
class Terms:
    """An einsum equation of two operands, ellipses spelled out: one letter per dimension."""

    lhs: str
    rhs: str
    out: str


def parse(equation: str, lhs_ndim: int, rhs_ndim: int) -> Terms:
    """Return the terms of `equation` for operands of these numbers of dimensions, or raise."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(
            f"einsum_str must have two operands and '->', like 'abc,cd->abd'; got {equation!r}."
        )
    lhs, rhs = operands.split(",")
    unused = [c for c in string.ascii_letters if c not in equation]

    def hidden(term: str, ndim: int) -> int:
        n = ndim - len(term.replace("...", ""))
        if n < 0 or (n > 0 and "..." not in term):
            raise ValueError(f"{equation!r}: {term!r} does not name {ndim} dimensions.")
        return n

    lhs_hidden, rhs_hidden = hidden(lhs, lhs_ndim), hidden(rhs, rhs_ndim)
    widest = max(lhs_hidden, rhs_hidden)

    def spelled(term: str, n: int) -> str:
        return term.replace("...", "".join(unused[widest - n : widest]))

    terms = Terms(spelled(lhs, lhs_hidden), spelled(rhs, rhs_hidden), spelled(out, widest))
    if any(len(set(term)) != len(term) for term in (terms.lhs, terms.rhs, terms.out)):
        raise ValueError(f"{equation!r} repeats a letter within a term, which is not a matmul.")
    missing = set(terms.out) - set(terms.lhs + terms.rhs)
    if missing:
        raise ValueError(f"{equation!r}: {sorted(missing)} of the result are in no operand.")
    return terms


def as_dot_general(
    terms: Terms,
    lhs: jax.Array,
    rhs: jax.Array | ScaledArray,
    dot_general: Callable[..., jax.Array],
    rhs_dtype: np.dtype | None = None,
) -> jax.Array:
    """Return the einsum as one ``dot_general(lhs, rhs, dimension_numbers)``.

    Dimensions that only one operand has are summed first; the result is transposed afterwards.
    `dot_general` casts `rhs` to `rhs_dtype`, if there is one.
    """
    needs_array = set(terms.rhs) - set(terms.lhs + terms.out) or 1 in (*lhs.shape, *rhs.shape)
    if needs_array:
        if isinstance(rhs, ScaledArray):
            rhs = rhs.dequantize()
        elif rhs_dtype is not None:
            rhs = rhs.astype(rhs_dtype)
    lhs_sizes = dict(zip(terms.lhs, lhs.shape, strict=True))
    rhs_sizes = dict(zip(terms.rhs, rhs.shape, strict=True))
    lhs, lhs_term = _drop_stretched(lhs, terms.lhs, rhs_sizes)
    rhs, rhs_term = _drop_stretched(rhs, terms.rhs, lhs_sizes)
    lhs, lhs_term = _sum_lonely(lhs, lhs_term, rhs_term + terms.out)
    rhs, rhs_term = _sum_lonely(rhs, rhs_term, lhs_term + terms.out)
    shared = [c for c in lhs_term if c in rhs_term]
    batch = [c for c in shared if c in terms.out]
    contract = [c for c in shared if c not in terms.out]

    def dims(letters: Sequence[str], term: str) -> tuple[int, ...]:
        return tuple(term.index(c) for c in letters)

    numbers = (
        (dims(contract, lhs_term), dims(contract, rhs_term)),
        (dims(batch, lhs_term), dims(batch, rhs_term)),
    )
    y = dot_general(lhs, rhs, numbers)
    produced = batch + [c for c in lhs_term + rhs_term if c not in shared]
    return y.transpose([produced.index(c) for c in terms.out])


def _drop_stretched(x: Any, term: str, other_sizes: dict[str, int]) -> tuple[Any, str]:
    """Return `x` without dimensions of size 1 that the other operand broadcasts, and its term."""
    dropped = [i for i, c in enumerate(term) if x.shape[i] == 1 and other_sizes.get(c, 1) != 1]
    kept = "".join(c for i, c in enumerate(term) if i not in dropped)
    return (x.squeeze(dropped) if dropped else x), kept


def _sum_lonely(x: jax.Array, term: str, elsewhere: str) -> tuple[jax.Array, str]:
    """Return `x` summed over dimensions that appear nowhere else, and its remaining term."""
    lonely = tuple(i for i, c in enumerate(term) if c not in elsewhere)
    kept = "".join(c for c in term if c in elsewhere)
    return (jnp.sum(x, axis=lonely) if lonely else x), kept
