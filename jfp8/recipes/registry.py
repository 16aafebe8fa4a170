"""Recipes by their names, and from JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jfp8.quantizers as quantizers
from jfp8.quantizers.rotations import Hadamard
from jfp8.recipes import blocks, intel, nvfp4, per_tensor, rowwise, unscaled
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import format_called

# Each family exports its recipes.
_FAMILIES = (per_tensor, rowwise, blocks, nvfp4, intel, unscaled)
RECIPES: tuple[type[Recipe], ...] = tuple(
    getattr(family, name) for family in _FAMILIES for name in family.__all__
)


def get(name: str, **fields: Any) -> Recipe:
    """The recipe called `name`, with `fields` set.

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
    return _class_called(name, RECIPES)(**fields)


def from_json(text: str, *, known: Sequence[type] = ()) -> Recipe:
    """Read the recipe that `Recipe.to_json` wrote.

    Args:
      text: a JSON object.
      known: classes that do not belong to jfp8, recipes or quantizers, that may occur in it.

    Returns:
      A recipe equal to the one that was written.

    Raises:
      ValueError: `text` is not such a JSON object, names an unknown recipe, or has a value that a
        field does not take.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.from_json('{"recipe": "DelayedScaling", "margin": 1}').margin
    1
    """
    try:
        return _from_fields(json.loads(text), known)
    except json.JSONDecodeError as error:
        raise ValueError(f"Not JSON: {error}. Write recipes with recipe.to_json().") from error
    except RecursionError:
        raise ValueError(
            "The JSON is nested too deeply for a recipe. Write recipes with recipe.to_json()."
        ) from None


def _from_fields(fields: Any, known: Sequence[type]) -> Recipe:
    if not isinstance(fields, dict) or not isinstance(fields.get("recipe"), str):
        raise ValueError(
            'A recipe in JSON is an object such as {"recipe": "DelayedScaling", "margin": 0}; '
            f"got {fields!r}."
        )
    own = tuple(c for c in known if issubclass(c, Recipe))
    recipe = _class_called(fields.pop("recipe"), (*RECIPES, PerOperand, *own))
    return recipe(**{name: _from_plain(value, known) for name, value in fields.items()})


def check_recipe(recipe: Any) -> Recipe:
    """`recipe`, or the one of that name with its defaults; else an error that says what to pass."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(
            f"recipe must be a recipe object, got the class {recipe.__name__}. Make one, with "
            f"parentheses: recipe={recipe.__name__}(). Or pass its name, as to "
            f'jfp8.recipes.get("delayed"); names: {_names()}.'
        )
    raise TypeError(
        f"recipe must be a recipe object such as jfp8.recipes.DelayedScaling(), got {recipe!r}. "
        f'Or a name, as for jfp8.recipes.get("delayed"); names: {_names()}.'
    )


def _from_plain(value: Any, known: Sequence[type]) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(v, known) for v in value)
    if not isinstance(value, dict):
        return value
    fields = {name: _from_plain(v, known) for name, v in value.items() if name != "class"}
    name = value.get("class")
    if name == "Format":
        return format_called(fields.get("name"))
    classes = [c for c in vars(quantizers).values() if isinstance(c, type)]
    classes = {c.__name__: c for c in (*classes, Product, Hadamard, *known)}
    if name not in classes:
        raise ValueError(
            f"{name!r} is not a class of jfp8. If it is yours, pass it: recipes.from_json(text, "
            "known=[ThatClass])."
        )
    return classes[name](**fields)


def _names(recipes: Sequence[type[Recipe]] | None = None) -> str:
    return ", ".join(f'"{recipe.name}" ({recipe.__name__})' for recipe in recipes or RECIPES)


def _class_called(name: str, recipes: Sequence[type[Recipe]]) -> type[Recipe]:
    for recipe in recipes:
        if name and name in (recipe.name, recipe.__name__):
            return recipe
    raise ValueError(f"There is no recipe called {name!r}. Recipes: {_names(recipes)}.")
