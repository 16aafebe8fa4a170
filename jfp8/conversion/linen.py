"""FP8 in Linen models that nobody edits: their layers' products are replaced as they are called.

Flax lets one intercept the calls of methods. Where a layer of Flax is about to run, its hook for a
product is set; the layer, and with it its parameters, stays what it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import numpy as np
from flax.core.scope import CollectionFilter, DenyList, in_filter, union_filters
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

from jfp8.conversion import edges
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Edge, Selection
from jfp8.layers.linen.attention import EinsumProduct
from jfp8.layers.linen.layers import apply_conv_transpose, apply_einsum
from jfp8.layers.linen.products import (
    ConvGeneralDilated,
    DotGeneral,
    ProductModule,
    ProductOf,
    promote_dtype,
    promote_values,
)
from jfp8.layers.linen.state_in_params import collections_into_params, collections_out_of_params
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.notes import note

_ALL_BUT_INTERMEDIATES = DenyList("intermediates")  # what Flax's `init` initializes

# The region while a model is looked at: no cached trace of another is mistaken for this one.
_LOOKING = Region(DelayedScaling(), enabled=False, selection="looking for the layers at the edges")


def _own_call(layer: type[nn.Module]) -> Callable[..., Any]:
    """The function that Flax runs for ``layer.__call__``, without what Flax wraps it in."""
    return inspect.unwrap(layer.__call__)


# How Flax runs each layer, and the hook that makes its product; None where there is no hook.
HOOKS: dict[Callable[..., Any], tuple[type[ProductModule], str | None]] = {
    _own_call(nn.Dense): (DotGeneral, "dot_general"),
    _own_call(nn.DenseGeneral): (DotGeneral, "dot_general"),
    _own_call(nn.Conv): (ConvGeneralDilated, "conv_general_dilated"),
    _own_call(nn.Einsum): (DotGeneral, None),
    _own_call(nn.ConvTranspose): (ConvGeneralDilated, None),
}
_WITHOUT_HOOK = {
    _own_call(nn.Einsum): apply_einsum,
    _own_call(nn.ConvTranspose): apply_conv_transpose,
}
_ATTENTION = _own_call(nn.MultiHeadDotProductAttention)
_ATTENTION_HOOKS = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")


def _function_of(context: nn.module.InterceptorContext) -> Any:
    """The function that Flax is about to run."""
    bound: Any = context.orig_method
    return bound.func


def is_layer(context: nn.module.InterceptorContext) -> bool:
    """Whether this is the call of a layer with a product that could be FP8."""
    # Of a lifted layer (nn.vmap, nn.remat) this is the call inside of the transformation.
    function: Any = _function_of(context)
    return function in HOOKS and not isinstance(context.module, nn.ConvLocal)


def has_own_product(layer: nn.Module, hook: str | None) -> bool:
    """Whether the layer was told what to compute its product with."""
    if hook is None:
        return False
    given = getattr(layer, f"{hook}_cls")
    ours = isinstance(given, ProductOf) and given.recipe is None
    return getattr(layer, hook) is not None or not (given is None or ours)


def path_of(module: nn.Module) -> str:
    """``"Block_0/Dense_1"``."""
    return "/".join(module.path)


@contextlib.contextmanager
def _set(module: nn.Module, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer is called with, by position or by name."""
    return args[0] if args else next(iter(kwargs.values()))


def replace_products(
    choose: Callable[[str, nn.Module, Any], ProductOf | str],
    attention: Callable[[], ProductOf | None],
) -> Callable[..., Any]:
    """An interceptor under which layers compute their products with what `choose` gives.

    Args:
      choose: ``(path, layer, input) -> `` what makes the product, or why it stays Flax's.
      attention: what makes the two products of attention.
    """

    def intercept(next_fun, args, kwargs, context):
        layer, function = context.module, _function_of(context)
        if function is _ATTENTION and (einsum := attention()) is not None:
            free = [hook for hook in _ATTENTION_HOOKS if getattr(layer, hook) is None]
            einsum = dataclasses.replace(einsum, module=EinsumProduct)
            with _set(layer, **dict.fromkeys(free, einsum)):
                return next_fun(*args, **kwargs)
        if not is_layer(context):
            return next_fun(*args, **kwargs)
        product, hook = HOOKS[function]
        made: Any
        if has_own_product(layer, hook):
            made = f"the layer was given its own {hook}"
        else:
            made = choose(path_of(layer), layer, _first(args, kwargs))
        stock = layer.promote_dtype is flax_promote_dtype
        if isinstance(made, str):
            promote = {"promote_dtype": promote_values} if stock else {}
            with (
                note("path", path_of(layer)),
                note("layer", type(layer).__name__),
                note("reason", made),
                _set(layer, **promote),
            ):
                return next_fun(*args, **kwargs)
        given = None if hook is None else getattr(layer, f"{hook}_cls")
        if isinstance(given, ProductOf):  # a layer of jfp8
            made = dataclasses.replace(made, implementation=given.implementation)
        made = dataclasses.replace(cast(ProductOf, made), module=product)
        attributes: dict[str, Any] = {} if hook is None else {f"{hook}_cls": made}
        if stock:
            attributes["promote_dtype"] = promote_dtype
        with _set(layer, **attributes):
            if hook is None:
                return _WITHOUT_HOOK[function](layer, made, *args, **kwargs)
            return next_fun(*args, **kwargs)

    return intercept


@contextlib.contextmanager
def in_region(recipe: Recipe, enabled: bool) -> Iterator[None]:
    """A region in which Flax's layers use `recipe`; see `jfp8.autocast`."""
    here = Region(recipe, enabled)

    def choose(path: str, layer: nn.Module, x: Any) -> ProductOf | str:
        del path, layer, x
        return ProductOf(DotGeneral, None, None) if region.current() == here else ""

    with region.entered(here), nn.intercept_methods(replace_products(choose, lambda: None)):
        yield


def convert_module(
    model: nn.Module, selection: Selection, on_init: Callable[..., None] | None = None
) -> nn.Module:
    """`model`, as an instance of a subclass of its class, whose calls are intercepted.

    ``on_init(model, variables, *args, **kwargs)`` is called at the end of ``model.init``.
    """
    fields = [f for f in dataclasses.fields(model) if f.init and f.name not in ("parent", "name")]
    arguments = {f.name: getattr(model, f.name) for f in fields}
    cls = converted_class(original_class(type(model)), selection, on_init)
    return cls(**arguments, parent=None, name=model.name)


def original_class(cls: type) -> type:
    """The class that was converted, or `cls` itself."""
    return getattr(cls, "jfp8_original", cls)


@functools.cache
def converted_class(
    cls: type[nn.Module], selection: Selection, on_init: Callable[..., None] | None = None
) -> type[nn.Module]:
    """The subclass of `cls` that `convert_module` makes instances of."""
    namespace: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {},
        "__init__": cls.__init__,  # Flax would write a new one, without what decorators added
        "jfp8_selection": selection,
        "jfp8_original": cls,
        "jfp8_on_init": staticmethod(on_init or (lambda *args, **kwargs: None)),
    }
    for name in _methods(cls):
        namespace[name] = _entering(cls, name)
    return type(cls)(cls.__name__, (_Converted, cls), namespace)


class _Converted:
    """What `converted_class` adds to a class: the ways into a model from outside."""

    jfp8_selection: ClassVar[Selection]
    jfp8_original: ClassVar[type[nn.Module]]
    jfp8_on_init: ClassVar[Callable[..., None]]

    def _original(self, name: str) -> Callable[..., Any]:
        """A method of ``nn.Module``, or what the converted class made of it."""
        return getattr(super(), name)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: CollectionFilter = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        """``nn.Module.apply`` with FP8 products."""
        selection = type(self).jfp8_selection
        selection.check_patterns(_paths(variables.get("params", {})))

        def run(variables, rngs, args, kwargs, mutable=mutable):
            return self._original("apply")(
                variables,
                *args,
                rngs=rngs,
                method=method,
                mutable=mutable,
                capture_intermediates=capture_intermediates,
                **kwargs,
            )

        if _inside(self):
            return run(variables, rngs, args, kwargs)
        found = _edges_of(selection, run, variables, rngs, args, kwargs)
        records = "fp8" in variables and in_filter(mutable, "fp8")
        inner = union_filters(mutable, ["params"]) if records else mutable
        with _intercepted(self, found, state_in_params=True):
            out = run(collections_into_params(variables, mutable), rngs, args, kwargs, inner)
        if mutable is False:
            return out
        y, mutated = out
        return y, collections_out_of_params(mutated, mutable)

    def init_with_output(
        self,
        rngs: Any,
        *args: Any,
        method: Any = None,
        mutable: CollectionFilter = _ALL_BUT_INTERMEDIATES,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """``nn.Module.init_with_output`` with FP8 products and their state."""
        cls = type(self)

        def run(variables, rngs, args, kwargs):
            del variables
            return self._original("init_with_output")(
                rngs,
                *args,
                method=method,
                mutable=mutable,
                capture_intermediates=capture_intermediates,
                **kwargs,
            )

        if _inside(self):
            return run({}, rngs, args, kwargs)
        found = _edges_of(cls.jfp8_selection, run, {}, rngs, args, kwargs)
        with _intercepted(self, found, state_in_params=True) as layers:
            y, variables = run({}, rngs, args, kwargs)
        variables = collections_out_of_params(variables, mutable)
        cls.jfp8_selection.check_patterns(_paths(variables.get("params", {})))
        cls.jfp8_selection.check_types(layers)
        cls.jfp8_on_init(self, variables, *args, **kwargs)
        return y, variables


def _methods(cls: type[nn.Module]) -> list[str]:
    """The methods by which a model may be called from outside."""
    names = []
    for name, value in inspect.getmembers(cls, inspect.isfunction):
        owned = getattr(nn.Module, name, None) is not value
        public = name == "__call__" or not name.startswith("_")
        if owned and public and name != "setup" and not getattr(value, "nowrap", False):
            names.append(name)
    return names


def _entering(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """The method `name` of `cls`, which enters the conversion if it has not been entered."""
    original = getattr(cls, name)

    @nn.nowrap
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self, *args, **kwargs)
        if self.scope is None or _inside(self):
            return run()
        if not self.scope.path and not self.scope.mutable:  # what `bind` gives
            unbound, variables = self.unbind()
            rngs = {stream: rng.rng for stream, rng in self.scope.rngs.items()}
            return unbound.apply(variables, *args, rngs=rngs, method=name, **kwargs)
        found = _Edges()
        if not self.scope.path:  # what `bind` gives with something mutable: it runs in place
            unbound, variables = self.unbind()
            plain = unbound._original("apply")
            found = _edges_of(
                type(self).jfp8_selection,
                lambda variables, rngs, args, kwargs: plain(
                    variables, *args, rngs=rngs, method=name, mutable=True, **kwargs
                ),
                variables,
                {stream: rng.rng for stream, rng in self.scope.rngs.items()},
                args,
                kwargs,
            )
        with _intercepted(self, found, state_in_params=False):  # also a part of another model
            return run()

    vars(method).pop("__wrapped__")  # Flax and inspect would look through it
    return method


def _inside(model: Any) -> bool:
    here = region.current()
    return here is not None and here.selection in (type(model).jfp8_selection, _LOOKING.selection)


@contextlib.contextmanager
def _intercepted(model: Any, found: _Edges, *, state_in_params: bool) -> Iterator[list[nn.Module]]:
    """Inside, the layers of `model` compute FP8 products. Gives a list that they are added to."""
    selection: Selection = type(model).jfp8_selection
    outer = region.current()
    here = Region(selection.recipe, outer is None or outer.enabled, selection, found)
    depth = () if model.scope is None else model.scope.path
    layers: list[nn.Module] = []

    def choose(path: str, layer: nn.Module, x: Any) -> ProductOf | str:
        if region.current() != here:
            return ""
        layers.append(layer)
        inner = "/".join(layer.path[len(depth) :])
        decision = selection.decide(inner, layer, found.edge_of(inner, layer, x))
        if decision.recipe is None:
            return decision.reason
        return ProductOf(DotGeneral, decision.recipe, None, state_in_params)

    def attention() -> ProductOf | None:
        if region.current() != here or not selection.attention_products:
            return None
        return ProductOf(DotGeneral, selection.recipe, None, state_in_params)

    with region.entered(here), nn.intercept_methods(replace_products(choose, attention)):
        yield layers


@dataclasses.dataclass(frozen=True)
class _Edges:
    """The paths of layers at the edges of a model."""

    first: frozenset[str] = frozenset()
    returned: frozenset[str] = frozenset()

    def edge_of(self, path: str, layer: nn.Module, x: Any) -> Edge | None:
        """At which edge the layer at `path` is, that is called with `x`."""
        if path in self.returned:
            return Edge.LOGITS
        image = isinstance(layer, nn.Conv) and np.shape(x)[-1] <= MAX_IMAGE_CHANNELS
        return Edge.IMAGE_INPUT if image and path in self.first else None


def _edges_of(
    selection: Selection,
    run: Callable[..., Any],
    variables: Any,
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Edges:
    """Found by tracing the model as it is once more, if the selection asks for edges."""
    if not any(isinstance(choice, Edge) for choice in selection.exempt + (selection.only or ())):
        return _Edges()

    def mark(next_fun, args, kwargs, context):
        if not is_layer(context):
            return next_fun(*args, **kwargs)
        path = path_of(context.module)
        args, kwargs = edges.mark_input((args, kwargs), path)
        return edges.mark_output(next_fun(*args, **kwargs), path)

    is_scaled = lambda x: isinstance(x, ScaledArray)
    values = lambda x: x.dequantize() if is_scaled(x) else x
    variables = jax.tree.map(values, variables, is_leaf=is_scaled)
    leaves, structure = jax.tree.flatten((variables, rngs, args, kwargs))
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def flat(arrays):
        given = list(leaves)
        for i, array in zip(traced, arrays, strict=True):
            given[i] = array
        return edges.arrays_in(run(*jax.tree.unflatten(structure, given)))

    with region.entered(_LOOKING), nn.intercept_methods(mark):
        closed = jax.make_jaxpr(flat)([leaves[i] for i in traced])
    n = len(jax.tree.leaves((variables, rngs)))  # `init` makes the parameters from the latter
    return _Edges(*edges.edge_layers(closed, sum(i < n for i in traced)))


def _paths(params: Any, path: str = "") -> list[str]:
    """The paths of all modules that have parameters."""
    paths = []
    for name, node in params.items():
        if isinstance(node, Mapping):
            inner = f"{path}/{name}".lstrip("/")
            paths += [inner, *_paths(node, inner)]
    return paths
