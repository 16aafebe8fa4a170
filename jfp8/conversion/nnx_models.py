"""Convert whole NNX models, and tell a report about the layers that stay as they are."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from flax import nnx

from jfp8.conversion.linen_attention import check_caching_layers
from jfp8.conversion.nnx import REASON, convert_module, layers_of, nodes_of, reason_of, subclass_of
from jfp8.conversion.nnx_edges import edges_of
from jfp8.conversion.nnx_parameters import convert_own, own_of, warn_if_unconverted
from jfp8.conversion.product_rows import INSIDE_OF_ATTENTION, INSIDE_OF_OURS
from jfp8.conversion.selection import Decision, Selection
from jfp8.layers.nnx.attention import MultiHeadAttention, has_stock_attention, install_cache
from jfp8.layers.nnx.hooks import hook_of
from jfp8.layers.nnx.products import Product
from jfp8.layers.nnx.transformer import LayerNormAttention, TransformerLayer
from jfp8.scaling.formats import Format
from jfp8.tracing.notes import layer_noted

# While a report is made: the path, the type and the reason.
_PLACE = "jfp8_place"


def convert_model(model: nnx.Module, selection: Selection) -> nnx.Module:
    """Convert `model` as `selection` says; see `jfp8.convert`."""
    layers = layers_of(model)
    own = own_of(model)
    _check_recipes(model, selection)
    selection.check_patterns([*(path for path, _ in layers), *(own.path for _, own in own)])
    selection.check_types([*(layer for _, layer in layers), *(node for node, _ in own)])
    decided = decisions(model, selection)
    converted = convert_module(
        model,
        lambda path, layer: (decided.get(path) or selection.decide(path, layer, None)).recipe,
        attention=selection.attention,
    )
    for path, layer in layers_of(converted):  # those that are left
        setattr(layer, REASON, decided[path].reason)
    convert_own(converted, selection)
    for _, node in nodes_of(converted):
        if hasattr(node, "unless_slower_on") and node.recipe is not None:
            node.unless_slower_on = selection.unless_slower_on
    if selection.cache_dtype is not None:
        _convert_caches(converted, selection.cache_dtype)
    if not any(isinstance(node, Product) for _, node in nodes_of(converted)):
        warn_if_unconverted(converted, selection, {})
    return converted


def _check_recipes(model: nnx.Module, selection: Selection) -> None:
    """Raise ``ValueError`` if a layer that was converted before is to have another recipe."""
    hooked = [(path, path, x, hook.name) for path, x in nodes_of(model) if (hook := hook_of(x))]
    owned = [(own.path, own.place, node, own.product) for node, own in own_of(model)]
    for path, place, node, name in (*hooked, *owned):
        product, wanted = getattr(node, name, None), selection.decide(path, node, None).recipe
        if not isinstance(product, Product) or product.path != place or not path:
            continue  # not converted
        if wanted is not None and product.recipe is not None and wanted != product.recipe:
            raise ValueError(
                f"The model is converted already: {path!r} has the recipe {product.recipe.name!r}, "
                f"and keeps it. Convert the original: jfp8.convert(original, {wanted.name!r})."
            )


def _convert_caches(converted: nnx.Module, dtype: np.dtype | Format) -> None:
    """Make attention keep keys and values in `dtype`; raise if something else keeps a cache."""
    for path, node in nodes_of(converted):
        if isinstance(node, nnx.MultiHeadAttention):
            install_cache(node, dtype, path)
            continue
        kept = any(isinstance(x, nnx.Cache) for x in vars(node).values())
        if kept or isinstance(node, TransformerLayer):
            raise ValueError(
                f"cache_dtype={dtype} does not reach the cache of {path!r}, a "
                f"{type(node).__name__}, but only those of nnx.MultiHeadAttention. Leave out "
                "cache_dtype. (Layers of jfp8 take the dtype in init_cache.)"
            )
    kinds = [type(node) for _, node in nodes_of(converted)]
    check_caching_layers(dtype, kinds, nnx.MultiHeadAttention, "nnx.MultiHeadAttention")


def decisions(model: nnx.Module, selection: Selection) -> dict[str, Decision]:
    """Decide on each layer, and each product with a parameter, as far as that precedes a call."""
    layers = layers_of(model)
    edges = edges_of(model, layers, selection)
    own = ((own.path, node) for node, own in own_of(model) if own.stays is None)
    return {path: selection.decide(path, node, edges.get(path)) for path, node in (*layers, *own)}


def note_place(node: Any, path: str) -> None:
    """Make the module `node` say, while `jfp8.report` looks, where it is and why it stays."""
    kind = type(node)
    if not isinstance(node, nnx.Module) or isinstance(node, Product) or not callable(node):
        return
    reason = reason_of(node) or ""
    if isinstance(node, nnx.MultiHeadAttention):
        stock = INSIDE_OF_OURS if isinstance(node, MultiHeadAttention) else INSIDE_OF_ATTENTION
        reason = stock if has_stock_attention(node) else "the layer was given its own attention_fn"
    if isinstance(node, LayerNormAttention):
        reason = INSIDE_OF_OURS
    object.__setattr__(node, "__class__", _noting(kind))
    setattr(node, _PLACE, (path, kind.__name__, reason))


@functools.cache
def _noting(kind: type[nnx.Module]) -> type[nnx.Module]:

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        path, layer, reason = getattr(self, _PLACE)
        with layer_noted(path, layer, reason):
            original: Any = kind.__call__  # or what nnx.jit made of it
            return original.__get__(self, kind)(*args, **kwargs)

    return subclass_of(kind, {"__call__": call})
