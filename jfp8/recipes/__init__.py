"""Recipes: which quantizer each operand of each of the three matmuls gets.

There is a file for each family of recipes; `get` finds a recipe by its name. To add one to a
family, write its class there and add it to that file's ``__all__``.
"""

from jfp8.recipes.block_scaling import *
from jfp8.recipes.in_json import from_json
from jfp8.recipes.intel import *
from jfp8.recipes.mxfp4 import *
from jfp8.recipes.nvfp4 import *
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.per_tensor import *
from jfp8.recipes.product import Product, Products
from jfp8.recipes.qat import *
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RECIPES, get
from jfp8.recipes.rowwise import *
from jfp8.recipes.unscaled import *
from jfp8.tracing.listing import listing

__all__ = ["RECIPES", "PerOperand", "Product", "Products", "Recipe", "from_json", "get"]
__all__ += [recipe.__name__ for recipe in RECIPES]

__dir__ = listing(__all__)
