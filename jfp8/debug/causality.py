"""Test if later tokens, or other sequences, change the results of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LooksAhead:
    """Changes of results with inputs that they should not depend on.

    Attributes:
      later: largest change at earlier positions, relative to the largest result; 0: bitwise
        identical. Inf: a result became, or was, NaN or Inf.
      others: the same with other sequences of the batch changed, or None if there are none.
    """

    later: float
    others: float | None

    @property
    def is_causal(self) -> bool:
        """Return True if no result depended on a later position."""
        return self.later == 0

    @property
    def is_batch_invariant(self) -> bool:
        """Return True if no result depended on another sequence; False without other sequences."""
        return self.others == 0

    def __str__(self) -> str:
        told = lambda change: "nothing" if change == 0 else f"results by {100 * change:.2g} %"
        lines = [f"Later positions change {told(self.later)}."]
        if self.others is not None:
            lines.append(f"Other sequences change {told(self.others)}.")
        return "\n".join(lines)


def looks_ahead(
    f: Callable[[jax.Array], Any], x: jax.typing.ArrayLike, *, sequence_axis: int = 1
) -> LooksAhead:
    """Test whether results depend on later positions or on other sequences of the batch.

    It changes positions from the second, the middle and the last one on, then all sequences but the
    first, and compares the other results. Values are multiplied by 0 and by 100; tokens (integers)
    become the smallest and the largest of `x`. Unchanged results prove nothing for other inputs,
    but shared scales change easily.

    Args:
      f: a model as a function of one array, ``lambda tokens: model.apply(variables, tokens)``; it
        is compiled. Results begin with the axes of `x`, from the batch (the first one) to the
        positions; arrays that lack these axes do not count.
      x: integers or floats, ``[batch, ..., positions, ...]``.
      sequence_axis: the axis of positions.

    Returns:
      A `LooksAhead`.

    Raises:
      ValueError: fewer than two positions; no result has the axes; or `f` gives another result when
        it is called again, as with dropout.

    References:
      docs/recipes.md lists the recipes for which `Recipe.is_causal` promises that nothing changes.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> layer = jfp8.Dense(8, recipe="current")
    >>> x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    >>> params = layer.init(jax.random.key(1), x)
    >>> jfp8.debug.looks_ahead(lambda x: layer.apply(params, x), x).is_causal
    False
    """
    x = jnp.asarray(x)
    if not 1 <= sequence_axis < x.ndim or x.shape[sequence_axis] < 2:
        raise ValueError(
            f"x of shape {x.shape} with sequence_axis={sequence_axis}: an axis of sequences, the "
            "first one, and another one of at least two positions are needed."
        )
    f = jax.jit(f)
    results = _with_axes(f(x), x, sequence_axis)
    if not results:
        raise ValueError(
            f"No result of f has the axes of x, {x.shape[: sequence_axis + 1]}: return a "
            "result for each position, such as logits, not a mean over positions."
        )
    again = _with_axes(f(x), x, sequence_axis)
    if _change(results, again) > 0:
        raise ValueError(
            "f gives another result for the same x: switch off what is random, such as dropout "
            "(deterministic=True), and what f keeps of earlier calls."
        )

    def change_along(axis: int, first: int) -> float:
        """Return the change before `first` with the inputs from there on."""
        axes = (slice(None),) * axis
        others = _variants(x, (*axes, slice(first, None)))
        found = (_with_axes(f(other), x, sequence_axis) for other in others)
        return max(_change(results, new, (*axes, slice(first))) for new in found)

    n = x.shape[sequence_axis]
    later = max(change_along(sequence_axis, first) for first in sorted({1, n // 2, n - 1}))
    return LooksAhead(later, change_along(0, 1) if x.shape[0] > 1 else None)


def _variants(x: jax.Array, where: tuple[slice, ...]) -> Iterator[jax.Array]:
    """Yield `x` with other values at `where`."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        yield from (x.at[where].multiply(factor) for factor in (0, 100))
    else:
        yield from (x.at[where].set(value) for value in (jnp.min(x), jnp.max(x)))


def _with_axes(results: Any, x: jax.Array, sequence_axis: int) -> list[np.ndarray]:
    axes = x.shape[: sequence_axis + 1]
    arrays = (y for y in jax.tree.leaves(results) if isinstance(y, jax.Array))
    return [np.asarray(y, np.float64) for y in arrays if y.shape[: len(axes)] == axes]


def _change(
    before: list[np.ndarray], after: list[np.ndarray], where: tuple[slice, ...] = ()
) -> float:
    """Return the largest relative difference at `where`; 0 only if all are equal."""
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        old, new = old[where], new[where]
        if not np.array_equal(old, new, equal_nan=True):
            with np.errstate(invalid="ignore", divide="ignore"):
                change = np.max(np.abs(new - old)) / np.max(np.abs(old))
            largest = max(largest, float(change) if np.isfinite(change) else np.inf)
    return largest
