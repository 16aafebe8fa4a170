"""What a product is: a bilinear operation, and the two products that each tensor takes part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from jfp8.matmul.choice import Implementation, check_implementation
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState

Kind = Literal["fprop", "dgrad", "wgrad"]
Operand = ScaledArray | jax.Array


class State(NamedTuple):
    """What products know of earlier steps and of chance; for the fields see `scaled_dot_general`.

    Attributes:
      histories: what is called ``state`` there.
    """

    histories: dict[str, AmaxState] | None = None
    sink: jax.Array | None = None
    key: jax.Array | None = None


@dataclass(frozen=True)
class How:
    """How products are computed, whatever they are; for the fields see `scaled_dot_general`.

    Raises:
      TypeError: no recipe.
      ValueError: unknown `implementation`.
    """

    recipe: Recipe
    implementation: Implementation = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            check_recipe(self.recipe)  # raises, and lists the recipes that there are
        check_implementation(self.implementation)


class Observed(NamedTuple):
    """amax of the two operands of a product, f32[] each; NaN or Inf where the operand has one."""

    lhs: jax.Array
    rhs: jax.Array


class Use(NamedTuple):
    """One of the two products that a tensor takes part in.

    Attributes:
      kind: which one.
      product: what the recipe says about it.
      quantizer: what it says about this operand; None leaves it in high precision.
      contracting: the dimensions of the tensor that the product sums over.
    """

    kind: Kind
    product: Product
    quantizer: Quantizer | None
    contracting: tuple[int, ...]


class Sums(NamedTuple):
    """How one of the three products is summed; see `scaled_matmul`."""

    accumulation: str = "f32"
    fast_accumulation: bool = False
    powers_of_two: bool = False


@dataclass(frozen=True)
class Operation:
    """A bilinear operation ``y = lhs . rhs`` on arrays of certain shapes: a pytree.

    Its operands are `ScaledArray`s, or plain arrays where a recipe leaves them in high precision:
    ``(lhs, rhs)`` for fprop, ``(grad, rhs)`` for dgrad, ``(lhs, grad)`` for wgrad. Its leaves, if
    it has some, are arrays that it needs beside them, neither quantized nor differentiated.

    Attributes:
      shapes: of lhs and rhs.
      dtypes: of lhs, rhs and y.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]

    def dtype_of(self, kind: Kind) -> np.dtype:
        """Of the result of one product: y, or what it is the gradient by."""
        return self.dtypes[{"fprop": 2, "dgrad": 0, "wgrad": 1}[kind]]

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of both operands that the product sums over."""
        raise NotImplementedError

    def terms(self, kind: Kind) -> int | None:
        """How many products each element of a result sums, for `jfp8.report`.

        None: what is computed says it, by its ``dot_general`` or ``conv_general_dilated``.
        """
        del kind
        return None

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """One operand, ``lhs``, ``rhs`` or ``grad``, as its quantizer says."""
        del role
        return quantizer(x, at)

    def quantize_for_both(
        self, role: str, x: jax.Array, first: Use, second: Use | None, state: AmaxState | None
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        """One operand as both of its products take it, and its amax, if that can be done at once.

        None if it cannot: then it is quantized for one product after the other. Without a backward
        pass there is no second product.
        """
        del role, x, first, second, state
        return None

    def laid_out(self, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        """A quantized operand as `multiply` takes it, for a sum over `contracting`."""
        del contracting
        return operand

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        """One of the three, in the dtype and layout of `y`, or of what it is the gradient by."""
        raise NotImplementedError
