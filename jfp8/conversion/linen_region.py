"""A region of a program in which Linen modules compute FP8 products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jfp8.conversion.linen_layers import replace_products
from jfp8.conversion.linen_parameters import by_choice, find_products
from jfp8.conversion.parameter_products import ParameterProduct
from jfp8.layers.linen.products import DotGeneral, ProductOf
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.recipe import Recipe


@contextlib.contextmanager
def in_region(recipe: Recipe, enabled: bool) -> Iterator[None]:
    """A region in which Flax's layers, and products of parameters, use `recipe`; see `autocast`."""
    here = Region(recipe, enabled)

    def choose(path: str, layer: nn.Module, x: Any, own: str) -> ProductOf | str:
        del path, layer, x
        if own or region.current() != here:
            return own
        return ProductOf(DotGeneral, None, None)

    def found(product: ParameterProduct) -> jax.Array:
        if region.current() != here:
            return product.plain()
        return by_choice(product, ProductOf(DotGeneral, None, None))

    with (
        region.entered(here),
        nn.intercept_methods(find_products(found)),
        nn.intercept_methods(replace_products(choose, lambda *_: None)),
    ):
        yield
