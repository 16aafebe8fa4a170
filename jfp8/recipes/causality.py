"""Causality and batch invariance of recipes: how far scales carry information into a result.

Elements that share a scale all affect it. If positions of a sequence share one, a result depends on
later positions: training sees them, decoding does not. If sequences share one, a result
depends on what else is in its batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from jfp8.quantizers.quantizer import EVERYWHERE, Along, Quantizer
from jfp8.recipes.product import Product, Products

Layer = Literal["dense", "conv", "moe", "attention"]
Operand = Literal["lhs", "rhs", "output"]
Among = Literal["positions", "sequences"]


class _Place(NamedTuple):
    """Dimensions of an operand that hold positions and sequences."""

    positions: Along
    sequences: Along


# The operands that are data; those not named are weights. A convolution is a matmul of patches,
# which hold what its result may depend on.
_ROWS = {"lhs": _Place("free", "free")}
LAYERS: tuple[Layer, ...] = ("dense", "conv", "moe", "attention")
OPERANDS: tuple[Operand, ...] = ("lhs", "rhs", "output")


def shares_among(
    products: Products, among: Among, layer: Layer, operand: Operand | None, history: bool
) -> bool:
    """Return True if the forward matmul of `layer` shares a scale among positions or sequences.

    Args:
      among: ``"positions"`` or ``"sequences"``.
      layer, operand, history: see `Recipe.is_causal`.

    Raises:
      ValueError: unknown `layer` or `operand`.
    """
    for name, given, allowed in (("layer", layer, LAYERS), ("operand", operand, (*OPERANDS, None))):
        if given not in allowed:
            raise ValueError(
                f"{name}={given!r} is unknown. Allowed: {', '.join(map(repr, allowed))}."
            )
    operands = OPERANDS if operand is None else (operand,)
    if layer == "attention":
        # Whatever the recipe: see `products.flash.numerics`.
        return False
    return _shares(products.fprop, _ROWS, among, operands, history)


def _shares(
    product: Product,
    places: dict[str, _Place],
    among: Among,
    operands: tuple[Operand, ...],
    history: bool,
) -> bool:
    for operand in operands:
        shared = _shared_along(getattr(product, operand), history)
        if operand == "output":
            if shared:  # one scale for all of it
                return True
        elif operand in places and getattr(places[operand], among) in shared:
            return True
    return False


def _shared_along(quantizer: Quantizer | None, history: bool) -> frozenset[Along]:
    if quantizer is None:
        return frozenset()
    # The bits of stochastic rounding depend on the amax of the tensor.
    return EVERYWHERE if quantizer.stochastic else quantizer.scale_shared_along(history)
