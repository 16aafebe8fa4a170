"""Products that Linen modules compute by themselves, with parameters of theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jfp8.conversion.parameter_products import (
    Parameter,
    ParameterProduct,
    followed_modules,
    following,
)
from jfp8.conversion.unconverted_warning import is_known
from jfp8.layers.linen.products import ProductOf
from jfp8.tracing.compat import not_interposed


def by_choice(product: ParameterProduct, chosen: ProductOf | str) -> jax.Array:
    """Computed by what `chosen` makes, or plain for that reason.

    The state is beside the parameter, as ``DotGeneral_<name>``. If the module differentiates, its
    own dgrad is another product, ``DotGeneral_<name>_2``: the amaxes of gradients have nothing to
    do with those of activations.
    """
    if isinstance(chosen, str):
        return product.staying(chosen)
    scope = product.parameter.module.scope
    assert scope is not None
    name = f"DotGeneral_{product.parameter.name}" + (f"_{product.nth}" if product.nth > 1 else "")
    return product.by(chosen(parent=scope.push(name, reuse=True)))


def find_products(found: Callable[[ParameterProduct], jax.Array]) -> Callable[..., Any]:
    """An interceptor under which each such product is what `found` gives for it."""

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        if is_known(type(module)) or is_known(context.orig_method.func):
            with not_interposed():  # layers have products of their own
                return next_fun(*args, **kwargs)
        modules = (module, *followed_modules())
        with following(modules, functools.partial(_parameter_of, modules), found):
            return next_fun(*args, **kwargs)

    return intercept


def _parameter_of(modules: tuple[nn.Module, ...], value: Any) -> Parameter | None:
    """The parameter of one of the `modules`, the innermost first, that `value` is."""
    for module in modules:
        scope = module.scope
        assert scope is not None
        for name, collections in list(scope.reservations.items()):
            if "params" not in collections or not scope.has_variable("params", name):
                continue
            stored = scope.get_variable("params", name)
            leaves = [stored] if stored is value else jax.tree.leaves(stored)  # of a box
            if any(leaf is value for leaf in leaves):
                return Parameter(module, "/".join(module.path), name)
    return None
