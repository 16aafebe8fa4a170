"""Attention and caches of Linen models, by Flax's interception of methods."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jfp8.conversion.selection import Decision, Selection
from jfp8.layers.linen.attention import EINSUM_HOOKS, MultiHeadDotProductAttention, cached, replaced
from jfp8.layers.linen.dot_product_attention import DotProductAttention, attention_fn_by, is_stock
from jfp8.scaling.formats import Format
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing.notes import note

_STOCK = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)
_ATTENTION = (_STOCK, inspect.unwrap(MultiHeadDotProductAttention.__call__))


def function_of(context: nn.module.InterceptorContext) -> Any:
    """Return the function that Flax runs for a method."""
    bound: Any = context.orig_method
    return bound.func


def own_attention(layer: nn.MultiHeadDotProductAttention) -> str:
    """Say what a `layer` of Flax was given to compute attention with; "" for nothing."""
    has = lambda name: getattr(layer, name, None) is not None
    given = [hook for hook in EINSUM_HOOKS if has(hook) or has(f"{hook}_cls")]
    given += [] if is_stock(layer.attention_fn) else ["attention_fn"]
    return f"the layer was given its own {' and '.join(given)}" if given else ""


def replace_attention(selection: Selection, seen: dict[str, Decision]) -> Callable[..., Any]:
    """Make an interceptor under which attention is computed as `selection` says.

    Attention also stores keys and values in its ``cache_dtype``. Decisions are added to `seen`.
    """

    def intercept(next_fun, args, kwargs, context):
        layer, function = context.module, function_of(context)
        if function not in _ATTENTION:
            return next_fun(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            asked = selection.attention
            if getattr(layer, "attention_products", False):  # and a recipe of its own decides
                asked = layer.recipe is None
            if asked:
                path, decision = _decide(layer, selection)
                seen[path] = decision
                stack.enter_context(note("reason", decision.reason))
                stack.enter_context(replaced(layer, **_attention_by(layer, decision)))
            if selection.cache_dtype is not None and function is _STOCK and layer.decode:
                own = cached(layer, selection.cache_dtype, layer.attention_fn)
                stack.enter_context(replaced(layer, **own))
            return next_fun(*args, **kwargs)

    return intercept


def _decide(layer: Any, selection: Selection) -> tuple[str, Decision]:
    """Return the path of attention between the projections of a `layer`, and what it becomes."""
    path, own = "/".join([*layer.path, "attention"]), own_attention(layer)
    return path, Decision(None, own) if own else selection.decide_on_attention(path, layer)


def _attention_by(layer: Any, decision: Decision) -> dict[str, Any]:
    """Return the attributes with which a `layer` computes attention as was decided."""
    if decision.recipe is not None:
        make = functools.partial(DotProductAttention, recipe=decision.recipe)
        return {"attention_fn": attention_fn_by(make, layer.attention_fn)}
    return {"attention_products": False} if hasattr(layer, "attention_products") else {}


def check_caching_layers(
    kept: np.dtype | Format, kinds: Iterable[type], layer: type, spelled: str
) -> None:
    """Raise ``ValueError`` if none of the `kinds` of modules is the `layer` with a cache."""
    if not any(issubclass(kind, layer) for kind in kinds):
        raise ValueError(
            f"cache_dtype={kept} is for models with {spelled}, and this model has no such layer. "
            "Caches that other modules make, or that are arguments, stay as they are. Leave out "
            "cache_dtype."
        )


def check_cache_dtypes(kept: np.dtype | Format, cache: Any) -> None:
    """Raise ``ValueError`` if something in the collection `cache` is not in the dtype `kept`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(meta.unbox(cache), is_leaf=is_scaled_array)
    for path, leaf in flat:
        stored = leaf.format if is_scaled_array(leaf) else leaf.dtype
        is_number = is_scaled_array(leaf) or jnp.issubdtype(stored, jnp.floating)
        if is_number and stored != kept:
            *module, name = (key.key for key in path)
            raise ValueError(
                f"cache_dtype={kept}, but {name} of {'/'.join(module) or 'the model'} is stored in "
                f"{stored}. Make the cache by init of the converted model. If the module is not "
                "nn.MultiHeadDotProductAttention, convert does not reach its cache: leave out "
                "cache_dtype. (Layers of jfp8 take cache_dtype themselves.)"
            )
