"""Another recipe for each layer, by patterns of paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe


@dataclass(frozen=True)
class PerLayer:
    """Recipes by pattern, as in ``{pattern: recipe}``: the first pattern that matches wins.

    Attributes:
      recipes: patterns of paths, and the recipe of matching layers; with None these stay in
        high precision, as do layers that no pattern matches.
    """

    recipes: tuple[tuple[str, Recipe | None], ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(pattern for pattern, _ in self.recipes)

    @property
    def given(self) -> tuple[Recipe, ...]:
        """All recipes that occur."""
        return tuple(recipe for _, recipe in self.recipes if recipe is not None)

    @property
    def needs_loss_scale(self) -> bool:
        """Return whether any of the recipes does."""
        return any(recipe.needs_loss_scale for recipe in self.given)

    def for_layer(self, path: str) -> Recipe | None:
        """Return the recipe of the layer at `path`."""
        _, recipe = self._first(path)
        return None if recipe is None else recipe.for_layer(path)

    def reason(self, path: str) -> str:
        """Return the reason why the layer at `path` has no recipe."""
        pattern, _ = self._first(path)
        return "no pattern of the recipes matches it" if pattern is None else f"{pattern!r}: None"

    def _first(self, path: str) -> tuple[str | None, Recipe | None]:
        matching = (both for both in self.recipes if path_matches(both[0], path))
        return next(matching, (None, None))


def check_recipes(given: Any) -> Recipe | PerLayer:
    """Return `given` as a recipe, or as recipes for layers if it is a dict, or raise."""
    if isinstance(given, PerLayer) or not isinstance(given, Mapping):
        return given if isinstance(given, PerLayer) else check_recipe(given)
    if not given:
        raise ValueError(
            "recipe={} says nothing of any layer. Give patterns of paths and the recipes of what "
            'they match: {"decoder/*": None, "*": "mxfp8"}.'
        )
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(
                f"recipe={given!r}: {pattern!r} is no pattern of paths. Write patterns and their "
                'recipes, the first that matches wins: {"decoder/*": None, "*": "mxfp8"}.'
            )
    checked = lambda recipe: None if recipe is None else check_recipe(recipe)
    return PerLayer(tuple((pattern, checked(recipe)) for pattern, recipe in given.items()))


def path_matches(pattern: str, path: str) -> bool:
    """Return True if `pattern` matches `path` or a module that contains it."""
    parts = path.split("/")
    wholes = ("/".join(parts[: n + 1]) for n in range(len(parts)))
    return any(fnmatch.fnmatchcase(whole, pattern) for whole in wholes)
