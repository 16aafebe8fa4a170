"""Recipes: which quantizer each operand of each of the three matmuls gets.

There is a file for each family of recipes; `get` finds a recipe by its name. To add one to a
family, write its class there, and name it in ``RECIPES`` and in ``__all__`` below.
"""

from typing import TYPE_CHECKING

from jfp8.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling
from jfp8.recipes.in_json import from_json
from jfp8.recipes.intel import DirectE5M2, Hybrid
from jfp8.recipes.mxfp4 import MXFP4BlockScaling
from jfp8.recipes.nvfp4 import NVFP4BlockScaling, NVFP4FourOverSix, NVFP4RowScaling
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.product import Product, Products
from jfp8.recipes.qat import QuantizationAware
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RECIPES, get
from jfp8.recipes.rowwise import RowwiseScaling
from jfp8.recipes.unscaled import Unscaled
from jfp8.tracing.listing import listing, missing

__all__ = [
    "DelayedScaling",
    "DirectE5M2",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Hybrid",
    "MXFP4BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "NVFP4FourOverSix",
    "NVFP4RowScaling",
    "PerOperand",
    "Product",
    "Products",
    "QuantizationAware",
    "RECIPES",
    "Recipe",
    "RowwiseScaling",
    "Unscaled",
    "from_json",
    "get",
]

__dir__ = listing(__all__)

if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__ = lambda name: missing(name, __name__, __all__)
