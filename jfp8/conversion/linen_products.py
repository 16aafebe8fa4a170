"""Replace the products of Linen modules as these are called, by Flax's interception of methods.

When a layer of Flax is about to run, its hook for a product is set; the layer and its parameters
stay as they are. While a module of the user's own runs, its parameters are followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

from jfp8.conversion.parameter_products import (
    Parameter,
    ParameterProduct,
    Prepared,
    followed_modules,
    following,
)
from jfp8.conversion.unconverted_warning import is_known
from jfp8.layers.linen.attention import EINSUM_HOOKS, MultiHeadDotProductAttention, cached, replaced
from jfp8.layers.linen.dot_product_attention import DotProductAttention, attention_fn_by, is_stock
from jfp8.layers.linen.layers import apply_conv_transpose, apply_einsum
from jfp8.layers.linen.products import (
    ConvGeneralDilated,
    DotGeneral,
    ProductModule,
    ProductOf,
    promote_dtype,
    promote_values,
)
from jfp8.layers.options import kernel_dtype
from jfp8.products.operation import Options, State
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.formats import Format
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing.compat import not_interposed
from jfp8.tracing.notes import layer_noted, note

# The function that Flax runs for the call of a layer.
_own_call: Callable[[type[nn.Module]], Any] = lambda layer: inspect.unwrap(layer.__call__)

# How Flax runs each layer, and the hook that makes its product; or what runs the layer instead.
_HOOKS: dict[Callable[..., Any], tuple[type[ProductModule], str | Callable[..., Any]]] = {
    _own_call(nn.Dense): (DotGeneral, "dot_general"),
    _own_call(nn.DenseGeneral): (DotGeneral, "dot_general"),
    _own_call(nn.Conv): (ConvGeneralDilated, "conv_general_dilated"),
    _own_call(nn.Einsum): (DotGeneral, apply_einsum),
    _own_call(nn.ConvTranspose): (ConvGeneralDilated, apply_conv_transpose),
}
_OPTIMIZED_CELL, _LSTM_CELL = _own_call(nn.OptimizedLSTMCell), _own_call(nn.LSTMCell)
_STOCK_ATTENTION = _own_call(nn.MultiHeadDotProductAttention)
_ATTENTION = (_STOCK_ATTENTION, _own_call(MultiHeadDotProductAttention))


def own_attention(layer: nn.MultiHeadDotProductAttention) -> str:
    """Say what a `layer` of Flax was given to compute attention with; "" for nothing."""
    has = lambda name: getattr(layer, name, None) is not None
    given = [hook for hook in EINSUM_HOOKS if has(hook) or has(f"{hook}_cls")]
    given += [] if is_stock(layer.attention_fn) else ["attention_fn"]
    return f"the layer was given its own {' and '.join(given)}" if given else ""


def _function_of(context: nn.module.InterceptorContext) -> Any:
    bound: Any = context.orig_method
    return bound.func


def is_layer(context: nn.module.InterceptorContext) -> bool:
    """Tell whether this is the call of a layer with a product that could be FP8."""
    # Of a lifted layer (nn.vmap, nn.remat) this is the call inside the transformation.
    return _function_of(context) in _HOOKS and not isinstance(context.module, nn.ConvLocal)


def replace_products(
    choose: Callable[[str, nn.Module, Any, str], ProductOf | str],
    attention: Callable[[str, nn.Module, str], Callable[..., DotProductAttention] | str | None],
) -> Callable[..., Any]:
    """Make an interceptor under which layers compute their products with what `choose` gives.

    It takes ``(path, layer, input, own)`` and returns what makes the product, or why it stays as it
    is; `own` says that the layer was given a product, which it then keeps. `attention` says the
    same of attention itself, whose path it gets; None leaves that alone.
    """

    def intercept(next_fun, args, kwargs, context):
        layer, function = context.module, _function_of(context)
        if function in _ATTENTION:
            made = attention("/".join([*layer.path, "attention"]), layer, own_attention(layer))
            with _attention_by(made, layer):
                return next_fun(*args, **kwargs)
        if function is _OPTIMIZED_CELL:  # which concatenates its kernels
            return _LSTM_CELL(layer, *args, **kwargs)
        if not is_layer(context):
            return next_fun(*args, **kwargs)
        product, hook = _HOOKS[function]
        given, own = None, False
        if isinstance(hook, str):
            given = getattr(layer, f"{hook}_cls")
            ours = isinstance(given, ProductOf) and given.recipe is None  # a layer of jfp8
            own = getattr(layer, hook) is not None or not (given is None or ours)
        x = args[0] if args else next(iter(kwargs.values()))
        path = "/".join(layer.path)
        made = choose(path, layer, x, f"the layer was given its own {hook}" if own else "")
        attributes: dict[str, Any] = {}
        if layer.promote_dtype is flax_promote_dtype:
            attributes["promote_dtype"] = promote_values if isinstance(made, str) else promote_dtype
        if isinstance(made, str):
            with layer_noted(path, type(layer).__name__, made), replaced(layer, **attributes):
                return next_fun(*args, **kwargs)
        run, made = next_fun, dataclasses.replace(made, module=product)
        if isinstance(given, ProductOf):
            made = dataclasses.replace(made, implementation=given.implementation)
        if isinstance(hook, str):
            attributes[f"{hook}_cls"] = made
        else:
            run = functools.partial(hook, layer, made)
        with replaced(layer, **attributes):
            return run(*args, **kwargs)

    return intercept


def _attention_by(made: Any, layer: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Enter what `layer` computes attention with; see `attention` of `replace_products`."""
    if made is None:
        return contextlib.nullcontext()
    if isinstance(made, str):
        return note("reason", made)
    return replaced(layer, attention_fn=attention_fn_by(made, layer.attention_fn))


def replace_caches(dtype: Callable[[], np.dtype | Format | None]) -> Callable[..., Any]:
    """Make an interceptor under which layers with ``decode=True`` store their cache in `dtype`.

    It is asked at each call; None leaves the cache as it is.
    """

    def intercept(next_fun, args, kwargs, context):
        layer = context.module
        if _function_of(context) is not _STOCK_ATTENTION or not layer.decode:
            return next_fun(*args, **kwargs)
        chosen = dtype()
        own = {} if chosen is None else cached(layer, chosen, layer.attention_fn)
        with replaced(layer, **own):
            return next_fun(*args, **kwargs)

    return intercept


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


def _prepared(product: ParameterProduct, chosen: ProductOf | str) -> Prepared:
    """Say how `product` is computed in the body of a loop; its state is next to the parameter."""
    if isinstance(chosen, str):
        return Prepared.staying(chosen)
    module = _module_of(product, chosen)
    own = None if module.recipe is None else check_recipe(module.recipe)
    recipe = region.recipe_in_effect(own, product.parameter.place)
    if recipe is None:
        return Prepared.staying(region.why_in_high_precision())
    state, records = module.begin(recipe)
    # A body cannot write into a collection: without a sink nothing would ever end a step.
    histories = None if records and state.sink is None else state.histories
    told = module.if_trained(recipe, state)

    def compute(inside: ParameterProduct, arrays: Any) -> jax.Array:
        dtype = kernel_dtype(inside.x, inside.weight, module.casts_kernel)
        options = Options(recipe, module.implementation, dtype, if_trained=told)
        return inside.in_fp8(options, State(*arrays), module.unless_slower_on)

    return Prepared(compute, (histories, state.sink))


def _module_of(product: ParameterProduct, chosen: ProductOf) -> ProductModule:
    """Make the module of a product, whose state is next to the parameter: ``DotGeneral_<name>``.

    If the module of the parameter differentiates, its own dgrad is another product,
    ``DotGeneral_<name>_2``: amaxes of gradients and of activations have nothing in common.
    """
    scope = product.parameter.module.scope
    assert scope is not None
    name = f"DotGeneral_{product.parameter.name}" + (f"_{product.nth}" if product.nth > 1 else "")
    is_free = not scope.name_reserved(name)
    inner = scope.push(name, reuse=True)
    if is_free:  # for a module that the user calls so
        del scope.reservations[name]
    return chosen(parent=inner, leading=product.loops)


def choose_products(chosen: Callable[[ParameterProduct], ProductOf | str]) -> Callable[..., Any]:
    """Make an interceptor under which `chosen` says what computes products of parameters."""

    def found(product: ParameterProduct) -> jax.Array:
        made = chosen(product)
        if isinstance(made, str):
            return product.staying(made)
        return product.by(_module_of(product, made))

    return find_products(found, lambda product: _prepared(product, chosen(product)))


def find_products(
    found: Callable[[ParameterProduct], jax.Array], prepare: Callable[[ParameterProduct], Prepared]
) -> Callable[..., Any]:
    """Make an interceptor under which products of parameters are found; see `Follower`."""

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        if is_known(type(module)) or is_known(_function_of(context)):
            with not_interposed():  # layers have products of their own
                return next_fun(*args, **kwargs)
        modules = (module, *followed_modules())
        with following(modules, functools.partial(_parameter_of, modules), found, prepare):
            return next_fun(*args, **kwargs)

    return intercept


def _parameter_of(modules: tuple[nn.Module, ...], value: Any) -> Parameter | None:
    """Find the parameter that `value` is, of one of the `modules`, the innermost first."""
    for module in modules:
        scope = module.scope
        assert scope is not None
        for name, collections in list(scope.reservations.items()):
            if "params" not in collections or not scope.has_variable("params", name):
                continue
            stored = scope.get_variable("params", name)
            if any(leaf is value for leaf in jax.tree.leaves(stored)):  # of a box, perhaps
                return Parameter(module, "/".join(module.path), name)
    return None


@contextlib.contextmanager
def in_region(recipe: Recipe, enabled: bool) -> Iterator[None]:
    """Let Flax's layers, and products of parameters, use `recipe` inside; see `autocast`."""
    here, made = Region(recipe, enabled), ProductOf(DotGeneral, None, None)

    choose = lambda path, layer, x, own: own if own or region.current() != here else made
    with (
        region.entered(here),
        nn.intercept_methods(choose_products(lambda _: choose("", None, None, ""))),
        nn.intercept_methods(replace_products(choose, lambda *_: None)),
    ):
        yield
