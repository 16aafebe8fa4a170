"""Recipes from JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jfp8.quantizers as quantizers
from jfp8.quantizers.rotations import Hadamard, RandomHadamard
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RECIPES, class_called
from jfp8.scaling.formats import format_called


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
    recipe = class_called(fields.pop("recipe"), (*RECIPES, PerOperand, *own))
    return recipe(**{name: _from_plain(value, known) for name, value in fields.items()})


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
    classes = {c.__name__: c for c in (*classes, Product, Hadamard, RandomHadamard, *known)}
    if name not in classes:
        raise ValueError(
            f"{name!r} is not a class of jfp8. If it is yours, pass it: recipes.from_json(text, "
            "known=[ThatClass])."
        )
    return classes[name](**fields)
