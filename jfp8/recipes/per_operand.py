"""The recipe in which you choose a quantizer for each operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe


@dataclass(frozen=True, repr=False)
class PerOperand(Recipe):
    """A recipe of your own: a quantizer, or None for high precision, for each operand.

    Attributes:
      fprop, dgrad, wgrad: the three products; see `Product` for the order of the operands.

    Raises:
      TypeError, ValueError: a combination that cannot be computed; see `Product` and `Products`.

    >>> import jfp8
    >>> from jfp8.quantizers import Current
    >>> from jfp8.recipes import PerOperand, Product
    >>> q = Current(jfp8.E4M3FN)
    >>> recipe = PerOperand(fprop=Product(q, q), dgrad=Product(q, q), wgrad=Product(None, None))
    """

    name: ClassVar[str] = "per_operand"

    fprop: Product
    dgrad: Product
    wgrad: Product

    def __post_init__(self) -> None:
        super().__post_init__()
        self.products()

    def products(self) -> Products:
        return Products(self.fprop, self.dgrad, self.wgrad)
