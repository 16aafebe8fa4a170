"""Causality and batch invariance of recipes: how far scales carry information into a result.

Elements that share a scale all affect it. If positions of a sequence share one, a result depends on
later positions: training sees them, decoding does not. If sequences share one, a result
depends on what else is in its batch.
"""

from __future__ import annotations

from typing import Literal

from jfp8.quantizers.quantizer import EVERYWHERE, Along, Quantizer
from jfp8.recipes.product import Products

Layer = Literal["dense", "conv", "moe", "attention"]
Operand = Literal["lhs", "rhs", "output"]
LAYERS: tuple[Layer, ...] = ("dense", "conv", "moe", "attention")
OPERANDS: tuple[Operand, ...] = ("lhs", "rhs", "output")


def shares_among_rows(
    products: Products, layer: Layer, operand: Operand | None, history: bool
) -> bool:
    """Return True if the forward matmul of `layer` shares a scale among rows of its data.

    Rows are positions and sequences alike. For the arguments see `Recipe.is_causal`.
    """
    for name, given, allowed in (("layer", layer, LAYERS), ("operand", operand, (*OPERANDS, None))):
        if given not in allowed:
            raise ValueError(
                f"{name}={given!r} is unknown. Allowed: {', '.join(map(repr, allowed))}."
            )
    if layer == "attention":
        # Whatever the recipe: see `products.flash.numerics`.
        return False
    # rhs is a weight. A convolution is a matmul of patches, which hold what its result may depend
    # on. A result that is quantized has one scale for all of it.
    shared = {
        "lhs": "free" in _shared_along(products.fprop.lhs, history),
        "rhs": False,
        "output": bool(_shared_along(products.fprop.output, history)),
    }
    return any(shared.values()) if operand is None else shared[operand]


def _shared_along(quantizer: Quantizer | None, history: bool) -> frozenset[Along]:
    if quantizer is None:
        return frozenset()
    # The bits of stochastic rounding depend on the amax of the tensor.
    return EVERYWHERE if quantizer.stochastic else quantizer.scale_shared_along(history)
