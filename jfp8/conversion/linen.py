"""Convert Linen models without editing them, by subclasses that intercept the calls of layers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.core.scope import CollectionFilter, DenyList, in_filter, union_filters
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict

from jfp8.conversion import edges
from jfp8.conversion.causal import masks_later_positions
from jfp8.conversion.linen_products import (
    check_cache_dtypes,
    check_caching_layers,
    choose_products,
    find_products,
    is_layer,
    replace_caches,
    replace_products,
)
from jfp8.conversion.parameter_products import ParameterProduct, mark_inside
from jfp8.conversion.product_rows import looks_ahead_message
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Decision, Edge, Selection
from jfp8.conversion.unconverted_warning import bridged_message, own_parameters, warn_of_nothing
from jfp8.layers.linen import state_in_params as placement
from jfp8.layers.linen.dot_product_attention import DotProductAttention
from jfp8.layers.linen.products import DotGeneral, ProductModule, ProductOf
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.trees import dequantize_tree
from jfp8.tracing.caller import user_level

_MAPS_SINKS = (
    "If this is nn.SpectralNorm, it normalizes every array of a converted layer, also the sinks of "
    "its histories. Inside it use jfp8.Dense, which need not be converted; or exempt the layer, "
    "jfp8.convert(model, exempt='its path'); or keep no histories: recipe='current'."
)
_ALL_BUT_INTERMEDIATES = DenyList("intermediates")  # what Flax's `init` initializes


def convert_module(
    model: nn.Module, selection: Selection, on_init: Callable[..., None] | None = None
) -> nn.Module:
    """Return `model` as an instance of a subclass of its class, whose calls are intercepted.

    ``model.init`` ends with ``on_init(model, variables, *args, **kwargs)``.
    """
    original = getattr(type(model), "jfp8_original", type(model))
    return _as(model, _converted_class(original, selection, on_init))


def _as(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return `model`, unbound, as an instance of `cls`."""
    fields = [f for f in dataclasses.fields(model) if f.init and f.name not in ("parent", "name")]
    return cls(**{f.name: getattr(model, f.name) for f in fields}, parent=None, name=model.name)


@functools.cache
def _converted_class(
    cls: type[nn.Module], selection: Selection, on_init: Callable[..., None] | None
) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {},
        "__init__": cls.__init__,  # Flax would write a new one, without what decorators added
        "jfp8_selection": selection,
        "jfp8_original": cls,
        "jfp8_on_init": staticmethod(on_init) if on_init else None,
    }
    for name in _methods(cls):
        namespace[name] = _entering(cls, name)
    return type(cls)(cls.__name__, (_Converted, cls), namespace)


class _Converted:
    """Enter the conversion where a model is called from outside; a base of converted classes."""

    jfp8_selection: ClassVar[Selection]
    jfp8_original: ClassVar[type[nn.Module]]
    jfp8_on_init: ClassVar[Callable[..., None] | None]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model that was converted, with what it was converted by."""
        cls, model = type(self), cast(nn.Module, self)
        if model.scope is not None:
            return super().__reduce_ex__(protocol)
        return convert_module, (_as(model, cls.jfp8_original), cls.jfp8_selection, cls.jfp8_on_init)

    def _original(self, name: str) -> Callable[..., Any]:
        return getattr(super(), name)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        mutable: CollectionFilter = False,
        **kwargs: Any,
    ) -> Any:
        """Run ``nn.Module.apply`` with FP8 matmuls."""
        selection = type(self).jfp8_selection
        params = variables.get("params", {})
        shapes = _shapes(params)
        names = [f"{path}/{name}".lstrip("/") for path, own in shapes.items() for name in own]
        names += [f"{path}/attention".lstrip("/") for path in ("", *_paths(params))]

        def run(variables, rngs, args, kwargs, mutable=mutable):
            apply = self._original("apply")
            try:
                return apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
            except InvalidRngError as error:
                if "fp8_sink" in variables:
                    error.add_note(_MAPS_SINKS)
                raise

        if _inside(self):
            return run(variables, rngs, args, kwargs)
        found = _edges_of(selection, run, variables, rngs, args, kwargs)
        records = "fp8" in variables and in_filter(mutable, "fp8")
        inner = union_filters(mutable, ["params"]) if records else mutable
        with _intercepted(self, found, state_in_params=True) as log:
            # Parameters are recognised by identity, which arrays of NumPy lose in JAX's functions.
            of_jax = lambda x: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x
            variables = jax.tree.map(of_jax, placement.collections_into_params(variables, mutable))
            out = run(variables, rngs, args, kwargs, inner)
        selection.check_patterns(_paths(params), [*names, *log.attentions])
        if kwargs.get("method") is None:
            log.warn(self, params)
        y, mutated = (out, {}) if mutable is False else out
        log.check_caches(selection, params, variables, mutated)
        if mutable is False:
            return y
        return y, placement.collections_out_of_params(mutated, mutable)

    def init_with_output(
        self,
        rngs: Any,
        *args: Any,
        mutable: CollectionFilter = _ALL_BUT_INTERMEDIATES,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Run ``nn.Module.init_with_output`` with FP8 matmuls and their state."""
        cls = type(self)

        def run(_, rngs, args, kwargs):
            init = self._original("init_with_output")
            return init(rngs, *args, mutable=mutable, **kwargs)

        if _inside(self):
            return run({}, rngs, args, kwargs)
        found = _edges_of(cls.jfp8_selection, run, {}, rngs, args, kwargs)
        with _intercepted(self, found, state_in_params=True) as log:
            y, variables = run({}, rngs, args, kwargs)
        variables = placement.collections_out_of_params(variables, mutable)
        params = variables.get("params", {})
        cls.jfp8_selection.check_patterns([*_paths(params), *log.products, *log.attentions])
        if log.knows_all(params):
            cls.jfp8_selection.check_types(log.layers)
        log.check_caches(cls.jfp8_selection, params, variables)
        log.warn(self, params)
        if cls.jfp8_on_init is not None:
            cls.jfp8_on_init(self, variables, *args, **kwargs)
        return y, variables


def _methods(cls: type[nn.Module]) -> list[str]:
    """List the methods by which a model may be called from outside."""
    return [
        name
        for name, value in inspect.getmembers(cls, inspect.isfunction)
        if getattr(nn.Module, name, None) is not value
        and (name == "__call__" or not name.startswith("_"))
        and not (name == "setup" or getattr(value, "nowrap", False))
        and not isinstance(inspect.getattr_static(cls, name), staticmethod)
    ]


def _entering(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """Make the method `name` of `cls` enter the conversion, unless it has been entered."""
    original = getattr(cls, name)

    @nn.nowrap
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self, *args, **kwargs)
        if self.scope is None or _inside(self):
            placement.keep_apart(self.scope)
            return run()
        found = _Edges()
        if not self.scope.path:  # what `bind` gives
            unbound, variables = self.unbind()
            rngs = {stream: rng.rng for stream, rng in self.scope.rngs.items()}
            if not self.scope.mutable:  # else it runs in place
                return unbound.apply(variables, *args, rngs=rngs, method=name, **kwargs)
            apply = functools.partial(unbound._original("apply"), method=name, mutable=True)
            again = lambda v, rngs, args, kwargs: apply(v, *args, rngs=rngs, **kwargs)
            found = _edges_of(type(self).jfp8_selection, again, variables, rngs, args, kwargs)
        with _intercepted(self, found, state_in_params=False):  # also a part of another model
            return run()

    vars(method).pop("__wrapped__")  # Flax and inspect would look through it
    return method


def _inside(model: Any) -> bool:
    here = region.current()
    selections = (type(model).jfp8_selection, edges.LOOKING.selection)
    return here is not None and here.selection in selections


@dataclasses.dataclass(frozen=True)
class _ConversionLog:
    """Log the modules of a model that are called; dicts are by path."""

    layers: list[nn.Module] = field(default_factory=list)  # that the selection was asked about
    attentions: list[str] = field(default_factory=list)  # paths, between projections of a layer
    products: set[str] = field(default_factory=set)  # paths of parameters that modules multiply by
    kinds: dict[str, type] = field(default_factory=dict)  # of all modules
    converted: set[str] = field(default_factory=set)  # paths of FP8 matmuls and attention
    stayed: dict[str, tuple[type, Decision]] = field(default_factory=dict)  # see `warn_of_nothing`
    bridged: dict[str, type] = field(default_factory=dict)  # NNX modules, which nothing reaches
    # The recipes of layers whose scales see later positions, where the model masks these.
    ahead: dict[str, str] = field(default_factory=dict)

    def watch(self, path: str, module: Any, selection: Selection) -> None:
        """Note a module that is called at `path`, from the converted model on."""
        before = self.kinds.get(path, type(module))
        if issubclass(before, ProductModule) != isinstance(module, ProductModule):
            raise ValueError(
                f"The module at {path!r} is called like the state of a product with the parameter "
                "beside it. Rename one of them, or exempt the parameter from the conversion."
            )
        self.kinds[path] = type(module)
        if isinstance(module, (ProductModule, DotProductAttention)):
            self.converted.add(path)
        if isinstance(module, DotProductAttention):
            self.attentions.append(path)
        found = {path: vars(module).get("nnx_class"), **_held(path, module)}  # getattr is watched
        for place, kind in found.items():
            if isinstance(kind, type) and not selection.decide(place, module, None).chosen:
                self.bridged[place] = kind

    def knows_all(self, params: Any) -> bool:
        """Return True if all modules with parameters were called.

        A method under ``nn.jit`` is not traced again, and calls in it are not seen again.
        """
        return all(path in self.kinds for path in _shapes(params))

    def check_caches(self, selection: Selection, params: Any, *variables: Any) -> None:
        """Raise ``ValueError`` if keys and values are not stored as `selection` says."""
        if selection.cache_dtype is not None:
            if self.knows_all(params):
                layer = nn.MultiHeadDotProductAttention
                spelled = "nn.MultiHeadDotProductAttention(decode=True)"
                check_caching_layers(selection.cache_dtype, self.kinds.values(), layer, spelled)
            for given in variables:
                check_cache_dtypes(selection.cache_dtype, given.get("cache", {}))

    def warn(self, model: Any, params: Any) -> None:
        """Warn, once, if nothing became FP8, if something cannot, or if scales look ahead."""
        here, warned = region.current(), "_jfp8_warned"
        disabled = here is not None and not here.enabled
        if disabled or warned in vars(model):
            return
        messages: Any = (looks_ahead_message, self.ahead), (bridged_message, self.bridged)
        for message, found in messages:
            if found:
                object.__setattr__(model, warned, True)
                warnings.warn(message(found), UserWarning, stacklevel=user_level())
        if self.bridged or self.converted or not self.knows_all(params):
            return
        known = {*self.stayed, *(path.rpartition("/")[0] for path in self.products)}
        kinds = {path: kind for path, kind in self.kinds.items() if path not in known}
        own = own_parameters(kinds, _shapes(params))
        if warn_of_nothing(model, "linen", self.stayed, own):
            object.__setattr__(model, warned, True)


def _held(path: str, module: nn.Module) -> dict[str, type]:
    """Find the NNX modules that `module` holds as if they were layers of Linen."""
    found: dict[str, type] = {}
    for name, value in vars(module).items():
        several = isinstance(value, (list, tuple))
        held = {f"{name}_{i}": x for i, x in enumerate(value)} if several else {name: value}
        for name, x in held.items():
            if isinstance(x, nnx.Module) and not type(x).__module__.startswith("jfp8."):
                found[f"{path}/{name}".lstrip("/")] = type(x)  # layers of jfp8 say it themselves
    return found


@contextlib.contextmanager
def _intercepted(model: Any, found: _Edges, *, state_in_params: bool) -> Iterator[_ConversionLog]:
    """Intercept the layers of `model` in this context, and log what was converted."""
    selection: Selection = type(model).jfp8_selection
    outer = region.current()
    depth = 0 if model.scope is None else len(model.scope.path)
    here = Region(selection.recipe, outer is None or outer.enabled, selection, found, depth)
    log = _ConversionLog()
    from_here = lambda path: "/".join(path.split("/")[depth:])

    def choose(path: str, layer: nn.Module, x: Any, own: str) -> ProductOf | str:
        if region.current() != here:
            return own
        inner = from_here(path)
        if own:
            decision = Decision(None, own)
        else:
            log.layers.append(layer)
            decision = selection.decide(inner, layer, found.edge_of(inner, layer, x))
        if decision.recipe is None:
            log.stayed[inner] = (type(layer), decision)
            return decision.reason
        log.converted.add(inner)
        if found.looks_ahead(layer, decision.recipe):
            log.ahead[inner] = decision.recipe.name
        where = state_in_params, selection.state_collection, selection.unless_slower_on
        return ProductOf(DotGeneral, decision.recipe, None, *where)

    def chosen(product: ParameterProduct) -> ProductOf | str:
        if region.current() != here:
            return ""
        path = product.parameter.path
        log.products.add(from_here(path))
        return choose(path, product.parameter.module, product.x, "")

    def attention(path: str, layer: Any, own: str) -> Callable[..., Any] | str | None:
        if region.current() != here or not selection.attention:
            return None
        if getattr(layer, "attention_products", False) and layer.recipe is not None:
            return None  # a layer of jfp8 that has it, with a recipe of its own
        inner = from_here(path)
        log.layers.append(layer)
        log.attentions.append(inner)
        decision = Decision(None, own) if own else selection.decide(inner, layer, None)
        if decision.recipe is None:
            return decision.reason
        how = getattr(layer, "implementation", None), selection.unless_slower_on
        return functools.partial(DotProductAttention, decision.recipe, *how)

    def watch(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is not None:
            placement.keep_apart(module.scope)
            log.watch("/".join(module.path[depth:]), module, selection)
        return next_fun(*args, **kwargs)

    kept = lambda: selection.cache_dtype if region.current() == here else None
    products = choose_products(chosen), replace_products(choose, attention)
    with region.entered(here), contextlib.ExitStack() as stack:
        for interceptor in (watch, *products, replace_caches(kept)):
            stack.enter_context(nn.intercept_methods(interceptor))
        yield log


@dataclasses.dataclass(frozen=True)
class _Edges:
    """Hold the paths of layers at the edges of a model; and whether it masks later positions."""

    first: frozenset[str] = frozenset()
    returned: frozenset[str] = frozenset()
    causal: bool = False

    def edge_of(self, path: str, layer: nn.Module, x: Any) -> Edge | None:
        """Tell at which edge the layer at `path` is, which is called with `x`."""
        if path in self.returned:
            return Edge.LOGITS
        image = isinstance(layer, nn.Conv) and np.shape(x)[-1] <= MAX_IMAGE_CHANNELS
        return Edge.IMAGE_INPUT if image and path in self.first else None

    def looks_ahead(self, layer: nn.Module, recipe: Recipe) -> bool:
        """Tell if scales of `layer` see later positions, where the model masks these."""
        kind = "conv" if isinstance(layer, nn.Conv) else "dense"
        masks = self.causal or getattr(layer, "padding", None) == "CAUSAL"
        return masks and not recipe.is_causal(kind, history=True)


def _edges_of(
    selection: Selection, run: Callable[..., Any], variables: Any, rngs: Any, args: Any, kwargs: Any
) -> _Edges:
    """Find the edges by tracing the model without FP8 once more, if they make a difference."""
    by_edge = any(isinstance(choice, Edge) for choice in selection.choices)
    if not by_edge and all(recipe.is_causal(history=True) for recipe in selection.recipes):
        return _Edges()

    def mark(next_fun, args, kwargs, context):
        if not is_layer(context):
            return next_fun(*args, **kwargs)
        path = "/".join(context.module.path)
        args, kwargs = edges.mark_input((args, kwargs), path)
        return edges.mark_output(next_fun(*args, **kwargs), path)

    variables = dequantize_tree(variables)
    arrays, together = edges.arrays_apart((variables, rngs, args, kwargs))
    with (
        region.entered(edges.LOOKING),
        nn.intercept_methods(find_products(edges.mark_product, mark_inside)),
        nn.intercept_methods(mark),
        nn.intercept_methods(replace_caches(lambda: selection.cache_dtype)),
    ):
        closed = jax.make_jaxpr(lambda arrays: edges.arrays_in(run(*together(arrays))))(arrays)
    # `init` makes the parameters from random numbers.
    parameters, _ = edges.arrays_apart((variables, rngs))
    causal = masks_later_positions(closed, (args, kwargs))
    return _Edges(*edges.edge_layers(closed, len(parameters)), causal)


def _shapes(params: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each module's parameters, by the module's path."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    flat: dict[tuple[str, ...], Any] = flatten_dict(meta.unbox(params))
    for (*module, name), value in flat.items():
        found.setdefault("/".join(module), {})[name] = np.shape(value)
    return found


def _paths(params: Any) -> set[str]:
    """Return the paths of all modules that have parameters, or hold modules that do."""
    return {"/".join(keys[:n]) for keys in flatten_dict(params) for n in range(1, len(keys))}
