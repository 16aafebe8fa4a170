"""Recipes by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jfp8.recipes import block_scaling, intel, mxfp4, nvfp4, per_tensor, qat, rowwise, unscaled
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.listing import did_you_mean

RECIPES: tuple[type[Recipe], ...] = (
    per_tensor.DelayedScaling,
    per_tensor.Float8CurrentScaling,
    rowwise.RowwiseScaling,
    block_scaling.Float8BlockScaling,
    block_scaling.MXFP8BlockScaling,
    mxfp4.MXFP4BlockScaling,
    nvfp4.NVFP4BlockScaling,
    nvfp4.NVFP4FourOverSix,
    nvfp4.NVFP4RowScaling,
    qat.QuantizationAware,
    intel.DirectE5M2,
    intel.Hybrid,
    unscaled.Unscaled,
)
# The names of `RECIPES`, for type checkers and completion.
RecipeName = Literal[
    Literal["delayed", "current", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4_4over6"],
    Literal["nvfp4_row", "qat", "direct_e5m2", "hybrid", "unscaled"],
]
RecipeLike = Recipe | RecipeName


def get(name: str, **fields: Any) -> Recipe:
    """Return the recipe called `name`, with `fields` set.

    Args:
      name: the `name` of a recipe's class, such as ``"delayed"`` or ``"mxfp8"``, or that class's
        own name.
      **fields: fields of that class.

    Returns:
      A recipe of that class.

    Raises:
      ValueError: unknown `name`; the message lists the known ones.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.get("delayed", amax_history_len=32).amax_history_len
    32
    """
    return class_called(name, RECIPES)(**fields)


def check_recipe(recipe: Any) -> Recipe:
    """Return `recipe`, or the one of that name with its defaults; raise for anything else."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    wrong = f" such as jfp8.recipes.DelayedScaling(), got {recipe!r:.60}"
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        name = recipe.__name__
        wrong = f", got the class {name}. Make one, with parentheses: recipe={name}()"
    raise TypeError(
        f"recipe must be a recipe object{wrong}. Or pass a name, as to "
        f'jfp8.recipes.get("delayed"); names: {_names()}.'
    )


def _names(recipes: Sequence[type[Recipe]] | None = None) -> str:
    return ", ".join(f'"{recipe.name}" ({recipe.__name__})' for recipe in recipes or RECIPES)


def class_called(name: str, recipes: Sequence[type[Recipe]]) -> type[Recipe]:
    """Return the one of `recipes` that is called `name`; see `get`."""
    for recipe in recipes:
        if name and name in (recipe.name, recipe.__name__):
            return recipe
    hint = did_you_mean(str(name), (known for r in recipes for known in (r.name, r.__name__)))
    raise ValueError(f"There is no recipe called {name!r}.{hint} Recipes: {_names(recipes)}.")
