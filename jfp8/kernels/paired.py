"""An operand of one product, with the factor of that product."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax

from jfp8.scaling.arrays import ScaledArray


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "carrier", "factor"),
    meta_fields=("block",),
)
@dataclass(frozen=True, eq=False)
class Paired(ScaledArray):
    """A `ScaledArray` whose scale is already multiplied by that of the operand it will meet.

    A kernel that quantizes an operand writes both. XLA would start a kernel for this one number.

    Attributes:
      factor: f32[], what `scale_products` gives for the scales of both operands.
    """

    factor: jax.Array = field(kw_only=True)
