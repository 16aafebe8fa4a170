"""The recipe in which you choose a quantizer for each operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe


@dataclass(frozen=True, repr=False)
class PerOperand(Recipe):
    """A custom recipe: a quantizer, or None for high precision, for each operand.

    Attributes:
      fprop, dgrad, wgrad: the three matmuls; see `Product` for the order of the operands. Of a
        recipe, or of the name of one, it is that product.

    Raises:
      TypeError, ValueError: a combination that cannot be computed; see `Product` and `Products`.
        An unknown name.

    >>> import jfp8
    >>> from jfp8.quantizers import Current
    >>> from jfp8.recipes import PerOperand, Product
    >>> q = Current(jfp8.E4M3FN)
    >>> recipe = PerOperand(fprop=Product(q, q), dgrad=Product(q, q), wgrad=Product(None, None))
    >>> recipe = PerOperand(fprop="nvfp4", dgrad="mxfp8", wgrad="mxfp8")
    >>> recipe.fprop == jfp8.recipes.NVFP4BlockScaling().products().fprop
    True
    """

    name: ClassVar[str] = "per_operand"

    fprop: Product
    dgrad: Product
    wgrad: Product

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("fprop", "dgrad", "wgrad"):
            given = getattr(self, kind)
            if isinstance(given, (Recipe, str)):
                # Frozen, and the only place where a field is not what was given.
                object.__setattr__(self, kind, getattr(check_recipe(given).resolved(), kind))
        self.products()

    def products(self) -> Products:
        return Products(self.fprop, self.dgrad, self.wgrad)
