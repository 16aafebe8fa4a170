"""`Comparison`: the result of `compare`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jfp8.conversion.tables import Printed, Table, table_lines
from jfp8.recipes.recipe import Recipe


@dataclass(frozen=True)
class ProductError:
    """Relative Frobenius errors of a product against high precision, on the same inputs.

    Attributes:
      total: ``|y' - y| / |y|``, where ``y'`` is the product under the recipe.
      cast: ``|y* - y| / |y|``, from rounding operands: ``y*`` is their product in high precision.
      product: ``|y' - y*| / |y|``, from accumulation, and from quantizing results.
    """

    total: float
    cast: float
    product: float


@dataclass(frozen=True)
class ComparedProduct:
    """One product of a layer under both recipes.

    Attributes:
      path, index: of the layer; see `TensorStats`.
      product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
      a, b: its errors.
    """

    path: str
    index: tuple[int, ...]
    product: str
    a: ProductError
    b: ProductError

    @property
    def layer(self) -> str:
        """Return the path with the index: ``"blocks/Dense_0[3]"``."""
        return self.path + "".join(f"[{i}]" for i in self.index)


@dataclass(frozen=True)
class ComparedGradient:
    """Gradient of the whole model with respect to one parameter, under each recipe.

    Attributes:
      path: of the parameter, ``"Dense_0/kernel"``.
      error_a, error_b: relative Frobenius error against the gradient in high precision.
      cosine_a, cosine_b: cosine of the angle between the two.
    """

    path: str
    error_a: float
    error_b: float
    cosine_a: float
    cosine_b: float


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """Result of `compare`; prints as tables.

    Attributes:
      recipe_a, recipe_b: the recipes.
      products: every product on its inputs in high precision, in program order.
      gradients: of the whole model, in which errors of all layers add up.
      loss, loss_a, loss_b: in high precision and under each recipe.
    """

    recipe_a: Recipe
    recipe_b: Recipe
    products: tuple[ComparedProduct, ...]
    gradients: tuple[ComparedGradient, ...]
    loss: float
    loss_a: float
    loss_b: float

    def worst(self, n: int = 5) -> tuple[ComparedProduct, ...]:
        """Return the `n` products with the largest total error under either recipe, in order."""
        error = lambda e: math.inf if math.isnan(e.total) else e.total
        return tuple(sorted(self.products, key=lambda row: -max(error(row.a), error(row.b)))[:n])

    def __str__(self) -> str:
        lines = [f"a = {self.recipe_a!r}", f"b = {self.recipe_b!r}", ""]
        for table in self._tables():
            head, *rows = table_lines(table)
            lines += [head, "-" * len(head), *rows, ""]
        losses = f"a {self.loss_a:.6g}, b {self.loss_b:.6g}"
        return "\n".join([*lines, f"loss: {self.loss:.6g} in high precision, {losses}"])

    def _tables(self) -> tuple[Table, Table]:
        """Return the tables of products and of gradients."""
        percent = lambda error: f"{100 * error:.3g} %"
        parts = ("total", "cast", "product")
        products = [("layer", "product", *(f"{part} {name}" for name in "ab" for part in parts))]
        for row in self.products:
            errors = [getattr(error, part) for error in (row.a, row.b) for part in parts]
            products.append((row.layer or "(no layer)", row.product, *map(percent, errors)))
        gradients = [("gradient by", "error a", "error b", "cosine a", "cosine b")]
        for g in self.gradients:
            cosines = (f"{g.cosine_a:.5f}", f"{g.cosine_b:.5f}")
            gradients.append((g.path, percent(g.error_a), percent(g.error_b), *cosines))
        return products, gradients
