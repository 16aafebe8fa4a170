"""The recipe in effect, which comes from the layer or from the region around it.

`jfp8.autocast` sets regions and layers read them. The region is part of the key of JAX's caches: a
function that was traced outside a region is traced again inside. Each thread has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from jfp8.recipes.per_layer import PerLayer
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe

DISABLED = "jfp8_disabled"
"""The named scope of regions in high precision, by which they are found in programs."""
DISABLED_HERE = "FP8 is disabled in this region"

_context = jax.make_user_context(None)
_override = jax.make_user_context(None)


@dataclass(frozen=True)
class Region:
    """The settings inside a region."""

    recipe: Recipe | PerLayer  # for layers without a recipe, by their paths
    enabled: bool  # False computes everything in high precision, even layers with a recipe
    models: tuple[Any, ...] = ()  # the converted models around; see `jfp8.conversion`
    by_program: bool = False  # matmuls of layers without a recipe are converted in the program


def entered(region: Region) -> AbstractContextManager[object]:
    """Return a context manager inside which `region` holds."""
    return _context(region)


def current() -> Region | None:
    """Return the innermost region, if any."""
    return _context.value


def overriding(recipe: Recipe) -> AbstractContextManager[object]:
    """Return a context manager inside which all layers use `recipe`, also those with their own."""
    return _override(recipe)


def is_overridden() -> bool:
    """Return True if recipes are overridden, so that the state of layers belongs to other ones."""
    return _override.value is not None


def recipe_in_effect(own: Recipe | PerLayer | None, path: str) -> Recipe | None:
    """Return the recipe of the layer at `path` with its `own`; None for high precision."""
    region = current()
    if region is not None and not region.enabled:
        return None
    if is_overridden():
        return _override.value.for_layer(path)
    if own is not None:
        return own.for_layer(path)
    if region is None:
        return DelayedScaling()
    return region.recipe.for_layer(path)


def recipe_of_matmul(own: Recipe | PerLayer | None, path: str) -> Recipe | None:
    """Return `recipe_in_effect`; None where the program of the model is converted instead."""
    region = current()
    if own is None and region is not None and region.by_program and not is_overridden():
        return None
    return recipe_in_effect(own, path)


def recipes_in_effect(own: RecipeLike | None, paths: Sequence[str]) -> list[Recipe]:
    """Return the recipes of the matmuls at `paths`, but for those in high precision."""
    own = None if own is None else check_recipe(own)
    found = (recipe_in_effect(own, path) for path in paths)
    return [each for each in found if each is not None]


def why_disabled() -> str:
    """Say that the region around disables FP8; "" if it does not."""
    region = current()
    return "" if region is None or region.enabled else DISABLED_HERE


def why_in_high_precision() -> str:
    """Return the reason why `recipe_in_effect` is None."""
    return why_disabled() or "its recipe is None"
