"""Measurements of arrays that can be merged: over iterations of a loop, over devices, over uses."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Measurement:
    """A measurement of tapped arrays, a vector ``f32[W]``: an abstract class.

    Derived classes name the elements of the vector, in this order.

    Attributes:
      sums: added up.
      powers: added up too: sums of squares, in units of the square of the first of the `maxima`,
        so that they neither overflow nor vanish.
      maxima: the largest counts; none is negative, except those that start with ``"minus_"``.
      bins: number of counts at the end, added up.
      weight: number of the tapped array that is the weight of a layer, if one is.
      forward: True for the forward pass, even where that is computed again.
    """

    sums: ClassVar[tuple[str, ...]] = ()
    powers: ClassVar[tuple[str, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = ()
    bins: ClassVar[int] = 0

    _: KW_ONLY
    weight: int | None = None
    forward: bool = False

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Measure the tapped arrays."""
        raise NotImplementedError

    def merged(self, vectors: Any, xp: Any = jnp) -> Any:
        """Merge vectors along the first axis, by ``jax.numpy`` or ``numpy``."""
        return self._merged(vectors, partial(xp.max, axis=0), partial(xp.sum, axis=0), xp)

    def merged_over_devices(self, vector: jax.Array, axis_names: tuple[Any, ...]) -> jax.Array:
        """Merge the vectors of all devices along some mesh axes."""
        if not axis_names:
            return vector
        largest = partial(lax.pmax, axis_name=axis_names)
        return self._merged(vector, largest, partial(lax.psum, axis_name=axis_names), jnp)

    def nothing(self) -> jax.Array:
        """Return the vector of an empty tensor."""
        low = [-np.inf if name.startswith("minus_") else 0.0 for name in self.maxima]
        before = np.zeros(len(self.sums) + len(self.powers))
        return jnp.asarray(np.concatenate([before, low, np.zeros(self.bins)]), jnp.float32)

    def named(self, vector: np.ndarray) -> dict[str, float]:
        """Return the elements by name, without the bins; `powers` in their own units."""
        names = self.sums + self.powers + self.maxima
        return dict(zip(names, vector[: len(names)].tolist(), strict=True))

    def _merged(self, vectors: Any, largest: Any, total: Any, xp: Any) -> Any:
        """Merge maxima by `largest`, the rest by `total`, powers in units of the new maxima."""
        start = len(self.sums) + len(self.powers)
        stop = start + len(self.maxima)
        maxima = largest(vectors[..., start:stop])
        unit, own = maxima[..., 0], vectors[..., start]
        ratio = (own / xp.where(unit > 0, unit, 1.0)) ** 2
        powers = vectors[..., len(self.sums) : start] * ratio[..., None]
        parts = [vectors[..., : len(self.sums)], powers, vectors[..., start:]]
        sums = total(xp.concatenate(parts, axis=-1))
        return xp.concatenate([sums[..., :start], maxima, sums[..., stop:]], axis=-1)
