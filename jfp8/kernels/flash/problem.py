"""Describe the attention that a kernel is compiled for, and how it falls into tiles and steps.

A block of a kernel takes one tile of a head: queries, or keys. It has three warpgroups. One only
copies, into a ring of shared memory; the other two compute, and go over what the ring brings: a
block of keys in each step, or a block of queries.
"""

from __future__ import annotations

import dataclasses
import math

from jfp8.scaling.formats import Format

BLOCK = 128  # keys of a step, and of a tile of keys
QUERIES = 64  # queries of a step


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describe the heads, and which keys their queries see.

    Attributes:
      rows: queries of a head, padded.
      keys: keys of a head, not padded.
      size: of a head.
      groups: how many heads of queries share a head of keys and values.
      scale: of the logits.
      left, right: bounds of the window; None: none.
      formats: of dS in dQ and in dK; of a forward pass: none.
    """

    rows: int
    keys: int
    size: int
    groups: int
    scale: float
    left: int | None
    right: int | None
    formats: tuple[Format, ...] = ()

    @property
    def factor(self) -> float:
        """Return the scale of logits in base 2."""
        return self.scale * math.log2(math.e)

    @property
    def windowed(self) -> bool:
        """Tell whether a query sees only the keys of a window."""
        return self.left is not None or self.right is not None


def window_of(is_causal: bool, window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return how far a query sees to the left and to the right; None: to the end."""
    left, right = window or (None, None)
    return left, 0 if is_causal else right
