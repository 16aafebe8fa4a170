"""Make the converted copy of an NNX model: see `jfp8.conversion.nnx` for what its calls do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jfp8.conversion.linen_attention import check_caching_layers
from jfp8.conversion.nnx import TAG, TracedCall, enter
from jfp8.conversion.nnx_layers import (
    Converted,
    Keys,
    Weight,
    converted_of,
    has_own_product,
    nodes_of,
    place_of,
    set_converted,
    spelled,
    stacks_of,
    weights_of,
    why_not,
)
from jfp8.conversion.selection import Decision, Edge, Selection
from jfp8.layers.nnx.attention import (
    has_stock_attention,
    install_attention,
    install_cache,
)
from jfp8.layers.nnx.hooks import hook_of
from jfp8.layers.nnx.products import DotGeneral, Product
from jfp8.layers.nnx.signatures import PrintsRecipe
from jfp8.layers.nnx.transformer import TransformerLayer
from jfp8.recipes.per_layer import PerLayer
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.formats import Format

Module = TypeVar("Module", bound=nnx.Module)


def convert_model(model: Module, selection: Selection, example: tuple[Any, ...] = ()) -> Module:
    """Return a copy of `model` whose calls enter the conversion; see `jfp8.convert`.

    It has state for what may become FP8; with an `example` of the arguments of a call, for what
    becomes FP8 in that call.
    """
    _check_what_is_asked(model, selection)
    converted = nnx.clone(model, graph=True)
    found, ours = _convertible(converted, selection), _without_recipe(converted)
    selection.check_patterns([*(w.path for _, w, _ in found), *(path for path, _, _ in ours)])
    selection.check_types([*(node for node, _, _ in found), *(layer for _, layer, _ in ours)])
    for keys, node in nodes_of(converted):
        _enter(node, spelled(keys), selection)
    for path, layer, product in ours:
        recipe = selection.decide(path, layer, None).recipe
        if recipe != DelayedScaling():  # the default of a layer: it keeps its histories
            product.recipe = recipe or PerLayer(())  # none: high precision
    decided = _planned(converted, example) if example else _decided(found, selection)
    for node, weight, _ in found:
        decision, leading = decided.get((id(node), weight.keys), (Decision(None), ()))
        if decision.recipe is not None:
            _hold(node, weight, decision.recipe, leading)
        elif example and decision.reason:
            _stay(node, weight, decision.reason)
    return converted


Found = list[tuple[nnx.Module, Weight, tuple[int, ...]]]
Decided = dict[tuple[int, Keys], tuple[Decision, tuple[int, ...]]]
"""The decision on each weight, by the id of its module and its keys, and stacked axes."""


def _decided(found: Found, selection: Selection) -> Decided:
    """Decide on each weight, and print that if asked for, as far as it is known before a call."""
    decided: Decided = {}
    for node, weight, leading in found:
        decision = selection.decide(weight.path, node, None)
        decided[id(node), weight.keys] = decision, leading
        if selection.verbose:
            print(f"{weight.path}: {repr(decision.recipe) if decision.recipe else decision.reason}")
    edges = [choice.value for choice in selection.exempt if isinstance(choice, Edge)]
    if edges and selection.verbose:
        print(f"Exempt, as jfp8.report(model, x) sees in a call: {'; '.join(edges)}")
    return decided


def _convertible(model: nnx.Module, selection: Selection) -> Found:
    """List the weights whose matmuls may become FP8, their modules, and the axes of stacks."""
    nodes = nodes_of(model)
    stacks = stacks_of(nodes)
    return [
        (node, weight, stacks[keys])
        for keys, node in nodes
        for weight in weights_of(node, spelled(keys), selection)
        if weight.holder and (hook_of(node) or _is_matrix(weight.of(node), len(stacks[keys])))
    ]


def _is_matrix(variable: nnx.Param, stacked: int) -> bool:
    value = variable.get_raw_value()
    matrix = len(getattr(value, "shape", ())) >= 2 + stacked
    return matrix and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _without_recipe(model: nnx.Module) -> list[tuple[str, Any, PrintsRecipe]]:
    """List the matmuls of jfp8's own layers that were given no recipe, with path and layer."""
    found = dict(nnx.iter_graph(model, graph=True))
    both = [(keys[:-1], x) for keys, x in found.items() if isinstance(x, PrintsRecipe)]
    return [(spelled(keys), found.get(keys), x) for keys, x in both if x.recipe is None]


def _enter(node: Any, path: str, selection: Selection) -> None:
    """Make calls of a module enter the conversion, which has no state for it yet."""
    kind, reason = None, ""
    is_attention = isinstance(node, nnx.MultiHeadAttention) and has_stock_attention(node)
    if selection.attention and is_attention:
        decision = selection.decide_on_attention(path, node)
        reason = decision.reason
        if decision.recipe is not None:
            install_attention(node, recipe=decision.recipe, path=path)
    if selection.cache_dtype is not None:
        kind = _class_with_cache(node, selection.cache_dtype, path)
    is_plain = converted_of(node) is None and has_own_product(node)
    enter(node, Converted(path, _weights(node, path, selection), is_plain, reason), kind)


def _weights(node: Any, path: str, selection: Selection) -> tuple[Weight, ...]:
    """List the weights of a module, those with state of an earlier conversion as these were."""
    here = converted_of(node)
    before = () if here is None else here.weights
    new = weights_of(node, path, selection)
    kept = [weight for weight in before if weight.product(node) is not None or not new]
    return tuple({weight.keys: weight for weight in (*new, *kept)}.values())


def _hold(node: Any, weight: Weight, recipe: Recipe, leading: tuple[int, ...]) -> None:
    """Give a module what holds the state of matmuls with one of its weights."""
    if weight.product(node) is not None:
        return  # it was converted before
    if (hook := hook_of(node)) is not None:
        product = hook.product_for(node, recipe, path=weight.path)
    else:
        product = DotGeneral(recipe=recipe, path=place_of(node), leading=leading)
    setattr(node, weight.holder, nnx.data(product))


def _stay(node: Any, weight: Weight, reason: str) -> None:
    """Leave the matmuls of a weight as they are."""
    here = converted_of(node)
    assert here is not None
    stays = lambda each: replace(each, stays=reason) if each.keys == weight.keys else each
    set_converted(node, replace(here, weights=tuple(map(stays, here.weights))))


def _planned(converted: Any, example: tuple[Any, ...]) -> Decided:
    """Decide on each weight by the plan of a call."""
    found: Decided = {}

    def look(*args: Any) -> None:
        function = type(converted).jfp8_original.__call__
        with nnx.update_context(TAG):
            call = TracedCall.of(function, converted, args, {})
            plan = call.plan()
        for name, (node, weight) in call.weights.items():
            if name in plan.by_name:
                each = plan.by_name[name]
                found[id(node), weight.keys] = each.decision, each.stacks

    jax.eval_shape(look, *example)
    return found


def _check_what_is_asked(model: nnx.Module, selection: Selection) -> None:
    """Raise ``ValueError`` if the model cannot have the caches that are asked for.

    Or if a layer that was converted before is to have another recipe.
    """
    for path, node, product in _converted_products(model):
        recipe, wanted = product.recipe, selection.decide(path, node, None).recipe
        if wanted is not None and recipe is not None and wanted != recipe:
            name = getattr(recipe, "name", recipe)
            raise ValueError(
                f"The model is converted already: {path!r} has the recipe {str(name)!r}, "
                f"and keeps it. Convert the original: jfp8.convert(original, {wanted.name!r})."
            )
    if selection.cache_dtype is not None:
        kinds = [type(node) for _, node in nodes_of(model)]
        layer = nnx.MultiHeadAttention
        check_caching_layers(selection.cache_dtype, kinds, layer, "nnx.MultiHeadAttention")


def _converted_products(model: nnx.Module) -> Iterator[tuple[str, Any, Product]]:
    """List the matmuls with a recipe in a model that was converted before."""
    for keys, node in nodes_of(model):
        here = converted_of(node)
        ours = (x for x in vars(node).values() if isinstance(x, Product) and x.recipe is not None)
        if here is not None and not here.weights:  # a layer of jfp8
            yield from ((spelled(keys), node, product) for product in ours)
        for weight in () if here is None else here.weights:
            own = () if weight.path == place_of(node) else weight.keys
            if (product := weight.product(node)) is not None:
                yield spelled((*keys, *own)), node, product


def _class_with_cache(node: Any, dtype: np.dtype | Format, path: str) -> type | None:
    """Return the class of attention that keeps keys and values in `dtype`; raise for others."""
    if isinstance(node, nnx.MultiHeadAttention):
        return install_cache(node, dtype, path)
    kept = any(isinstance(x, nnx.Cache) for x in vars(node).values())
    if kept or isinstance(node, TransformerLayer):
        raise ValueError(
            f"cache_dtype={dtype} does not reach the cache of {path!r}, a "
            f"{type(node).__name__}, but only those of nnx.MultiHeadAttention. Leave out "
            "cache_dtype. (Layers of jfp8 take the dtype in init_cache.)"
        )
    return None


def with_notes(model: Any) -> Any:
    """Make the modules of a model note their places in the programs of their calls, for a report.

    Modules of a converted model do that already.
    """
    for keys, node in nodes_of(model):
        if converted_of(node) is None:
            reason = (why_not(node) or "not converted") if hook_of(node) else ""
            reason = "" if has_own_product(node) else reason
            enter(node, Converted(spelled(keys), is_plain=True, reason=reason))
    return model
