"""Operands of attention, and the projections that they are a part of.

A kernel can quantize heads from where a projection wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Whole:
    """What some heads are a part of: in each group, as many as they are from `first` on.

    Attributes:
      array: ``[batch, tokens, groups, heads of a group, depth]``.
      first: the first of them.
    """

    array: jax.Array
    first: int = field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Heads, and what they are a part of. What is no attention of jfp8 takes the array.

    Attributes:
      array: ``[batch, tokens, heads, depth]``, the heads of one group after another; gradients are
        its.
      whole: gets no gradient.
    """

    array: jax.Array
    whole: Whole

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


def split_heads(x: Any) -> tuple[Any, Whole | None]:
    """The heads alone, and what they are a part of, if that is known."""
    return (x.array, lax.stop_gradient(x.whole)) if isinstance(x, Heads) else (x, None)
