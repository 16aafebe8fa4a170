"""Convert Linen models without editing them: the front door for `program`, `plan` and `run`.

A converted model is an instance of a subclass of its class. A call from outside traces the call of
the original, computes its program with FP8 matmuls, and keeps their states in collections.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import flax.core
import flax.linen as nn
import jax
from flax.core.scope import CollectionFilter, DenyList, LazyRng, in_filter
from flax.traverse_util import flatten_dict, unflatten_dict

from jfp8.conversion.linen_attention import (
    check_cache_dtypes,
    check_caching_layers,
    replace_attention,
)
from jfp8.conversion.linen_seen import Seen, shapes_of, watching
from jfp8.conversion.linen_state import STATES, init_collections, read_states, write_states
from jfp8.conversion.plan import Plan, plan_of
from jfp8.conversion.program import Program
from jfp8.conversion.report import report
from jfp8.conversion.run import States, run_planned
from jfp8.conversion.selection import Edge, Selection
from jfp8.layers.linen import messages
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.recipe import Recipe

_ALL_BUT_INTERMEDIATES = DenyList("intermediates")  # the method that Flax's `init` initializes


def convert_module(model: nn.Module, selection: Selection) -> nn.Module:
    """Return `model` as an instance of a subclass of its class, whose calls are converted."""
    original = getattr(type(model), "jfp8_original", type(model))
    return as_class(model, _converted_class(original, selection))


@functools.cache
def _converted_class(cls: type[nn.Module], selection: Selection) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {},
        "__init__": cls.__init__,  # Flax would write a new one, without what decorators added
        "jfp8_selection": selection,
        "jfp8_original": cls,
    }
    for name in _methods(cls):
        namespace[name] = _entering(cls, name)
    return type(cls)(cls.__name__, (_Converted, cls), namespace)


class _Converted:
    """Convert where a model is called from outside; a base of converted classes."""

    jfp8_selection: ClassVar[Selection]
    jfp8_original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model that was converted, with what it was converted by."""
        cls, model = type(self), self
        if model.scope is not None:  # pyrefly: ignore
            return super().__reduce_ex__(protocol)
        original = as_class(model, cls.jfp8_original)  # pyrefly: ignore
        return convert_module, (original, cls.jfp8_selection)

    def apply(
        self, variables: Mapping[str, Any], *args: Any, rngs: Any = None, **kwargs: Any
    ) -> Any:
        """Run ``nn.Module.apply`` with FP8 matmuls."""
        call = Call.of(self, type(self).jfp8_selection)
        if region.why_disabled():
            return call.model.apply(variables, *args, rngs=rngs, **kwargs)
        return call.apply(variables, args, rngs, kwargs)

    def init_with_output(
        self,
        rngs: Any,
        *args: Any,
        mutable: CollectionFilter = _ALL_BUT_INTERMEDIATES,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Run ``nn.Module.init_with_output``, and add the states of FP8 matmuls."""
        call = Call.of(self, type(self).jfp8_selection)
        original = functools.partial(call.model.init_with_output, mutable=mutable)
        create = lambda: original(rngs, *args, **kwargs)
        if region.why_disabled():
            y, variables = create()
        else:
            y, variables = call.init(create, args, rngs, mutable, kwargs)
        if call.selection.verbose:
            print(report(self, *jax.eval_shape(lambda: (variables, *args)), **kwargs))
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
    """Make the method `name` of `cls` convert where it is called on a bound module."""
    original = getattr(cls, name)

    @nn.nowrap
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_converted = hasattr(type(self), "jfp8_selection")
        if self.scope is None or not is_converted or region.why_disabled():
            return original(self, *args, **kwargs)
        call = Call.of(self, type(self).jfp8_selection)
        return call.in_scope(self, name, args, kwargs)

    vars(method).pop("__wrapped__")  # Flax and inspect would look through it
    return method


@contextmanager
def in_region(recipe: Recipe, enabled: bool) -> Iterator[None]:
    """Convert the outermost Linen modules that are called inside; see `jfp8.autocast`."""
    here = Region(recipe, enabled)
    selection = Selection(recipe, exempt=())

    def intercept(next_fun, args, kwargs, context):
        module, name = context.module, context.method_name
        is_call = module.scope is not None and name != "setup" and not name.startswith("_jfp8")
        if not is_call or region.current() != here or isinstance(module, _Converted):
            return next_fun(*args, **kwargs)
        return Call.of(module, selection).in_scope(module, name, args, kwargs)

    inside = nn.intercept_methods(intercept) if enabled else jax.named_scope(region.DISABLED)
    with region.entered(here), inside:
        yield


def as_class(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return `model`, unbound, as an instance of `cls`."""
    fields = [f for f in dataclasses.fields(model) if f.init and f.name not in ("parent", "name")]
    return cls(**{f.name: getattr(model, f.name) for f in fields}, parent=None, name=model.name)


class Call(NamedTuple):
    """Hold what is called: the original model, unbound; and what is to be converted.

    Attributes:
      place: the path of the module in a model that is not converted.
      warns: the model whose user is warned, once.
    """

    model: nn.Module
    selection: Selection
    place: tuple[str, ...]
    warns: Any

    @classmethod
    def of(cls, model: Any, selection: Selection) -> Call:
        place = () if model.scope is None else model.scope.path
        unbound = model if model.scope is None else model.unbind()[0]
        original = getattr(type(model), "jfp8_original", type(model))
        return cls(as_class(unbound, original), selection, place, model)

    def apply(
        self, variables: Mapping[str, Any], args: Any, rngs: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``model.apply`` does, with FP8 matmuls and new states."""
        mutable, is_call = kwargs.get("mutable", False), kwargs.get("method") is None
        others = {name: x for name, x in variables.items() if name != "params"}

        def run(params: Any, others: Any) -> Any:
            collections, rngs, args, kwargs = others
            given = collections if params is None else {"params": params, **collections}
            return self.model.apply(given, *args, rngs=rngs, **kwargs)

        # A model sees no states except of layers of jfp8 that were given a recipe.
        without = {name: x for name, x in others.items() if name not in STATES}
        program, seen = self._traced(run, variables, (without, rngs, args, kwargs))
        if seen.ours and len(without) < len(others):
            program, seen = self._traced(run, variables, (others, rngs, args, kwargs))
        plan = self._plan(program, seen, warns=is_call)
        states: States = {}
        if not region.is_overridden():
            states = read_states(plan, self.selection.state_collection, variables, mutable)
        key = rngs.get("fp8") if isinstance(rngs, Mapping) else None
        key = key.as_jax_rng() if isinstance(key, LazyRng) else key
        told = messages.WITHOUT_HISTORIES
        out, observed = run_planned(program, plan, states, key=key, if_lacking=told)
        y, mutated = (out, {}) if mutable is False else out
        self._check_caches(seen, variables, mutated)
        if mutable is False:
            return y
        kept = {name: variables[name] for name in STATES if name in variables}
        kept = {n: {**x, **mutated.get(n, {})} for n, x in kept.items() if in_filter(mutable, n)}
        if "fp8" in kept:
            kept["fp8"] = write_states(kept["fp8"], states, observed)
        return y, type(mutated)({**mutated, **kept})

    def init(
        self,
        create: Callable[[], tuple[Any, Any]],
        args: Any,
        rngs: Any,
        mutable: CollectionFilter,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return the result of ``init``, and its variables with the states of the matmuls.

        Args:
          create: the ``init_with_output`` of the original.
        """
        method = kwargs.get("method")
        kwargs = {k: x for k, x in kwargs.items() if k not in ("method", "capture_intermediates")}

        def run(params: Any, others: Any) -> Any:
            rngs, args, kwargs = others
            init = _initialize(self.model, {"params": params}, rngs, True, method)
            return init(*args, **kwargs)[0]

        with self._watched(Seen(self.selection, self.place)):
            _, variables = create()
        program, seen = self._traced(run, {"params": {}, **variables}, (rngs, args, kwargs))
        self._check_caches(seen, variables)
        plan = self._plan(program, seen, of_init=True)
        collection = self.selection.state_collection
        flat = {}
        for name, states in init_collections(plan, collection, mutable).items():
            flat[name] = {**flatten_dict(states), **flatten_dict(variables.get(name, {}))}
        new = {name: unflatten_dict(each) for name, each in flat.items()}
        return run_planned(program, plan, {})[0], type(variables)({**variables, **new})

    def in_scope(self, module: Any, method: Any, args: Any, kwargs: Any) -> Any:
        """Call a bound module: compute as `apply` and ``init`` do, and write what they return."""
        scope = module.scope
        variables = flax.core.unfreeze(scope.variables())
        rngs = dict(scope.rngs)
        for name, rng in scope.rngs.items():  # another call has other random numbers
            if scope.rng_counters[name]:
                rngs[name] = LazyRng.create(rng, scope.rng_counters[name])
            scope.rng_counters[name] += 1
        if module.is_initializing():
            run = _initialize(self.model, variables, rngs, scope.mutable, method)
            create = functools.partial(run, *args, **kwargs)
            y, new = self.init(create, args, rngs, scope.mutable, {**kwargs, "method": method})
        else:
            how = {**kwargs, "method": method, "mutable": scope.mutable}
            out = self.apply(variables, args, rngs, how)
            y, new = out if scope.mutable is not False else (out, {})
        for collection, tree in new.items():
            for name, value in tree.items():
                scope.put_variable(collection, name, value)
        return y

    @contextmanager
    def _watched(self, seen: Seen, *apart: object) -> Iterator[None]:
        """Return a context in which the plain model is traced, and its modules are noted.

        JAX keeps no trace from one context for another if they are told `apart`.
        """
        outer = region.current()
        here = (self.place, self.selection, *apart)
        models = (*(() if outer is None else outer.models), here)
        plain = Region(self.selection.recipe, True, models, by_program=True)
        attention = replace_attention(self.selection, seen.attentions)
        with (
            region.entered(plain),
            nn.intercept_methods(watching(seen, models)),
            nn.intercept_methods(attention),
        ):
            yield

    def _traced(
        self, function: Any, variables: Mapping[str, Any], others: Any
    ) -> tuple[Program, Seen]:
        """Trace ``function(params, others)`` of the plain model, and note its modules."""
        params, paths = variables.get("params"), []
        for keys, _ in Program.leaves_with_path(params):
            paths.append("/".join(str(key.key) for key in keys if hasattr(key, "key")))
        seen = Seen(self.selection, self.place, shapes_of(params))

        def traced(*apart: object) -> Program:
            def run(params: Any, others: Any) -> Any:
                with self._watched(seen, *apart):
                    return function(params, others)

            return Program.of(run, params, paths, others)

        program = traced()
        return program if seen.is_complete(program, variables) else traced(object()), seen

    def _plan(
        self, program: Program, seen: Seen, *, warns: bool = True, of_init: bool = False
    ) -> Plan:
        plan = plan_of(program, seen.named, edges=() if self.place else Edge)
        seen.check(plan, of_init=of_init)
        if warns:
            seen.warn(self.warns, plan)
        return plan

    def _check_caches(self, seen: Seen, *variables: Any) -> None:
        """Raise ``ValueError`` if keys and values are not stored as the selection says."""
        dtype = self.selection.cache_dtype
        if dtype is None:
            return
        if seen.knows_all:
            layer = nn.MultiHeadDotProductAttention
            spelled = "nn.MultiHeadDotProductAttention(decode=True)"
            check_caching_layers(dtype, seen.kinds.values(), layer, spelled)
        for given in variables:
            check_cache_dtypes(dtype, given.get("cache", {}))


def _initialize(
    model: nn.Module, variables: Any, rngs: Any, mutable: Any, method: Any
) -> Callable[..., tuple[Any, Any]]:
    """Return ``model.init_with_output`` as a function of arguments, with existing `variables`."""

    def call(scope: Any, *args: Any, **kwargs: Any) -> Any:
        bound = model.clone(parent=scope, _deep_clone=True)
        if method is None or isinstance(method, str):
            return getattr(bound, method or "__call__")(*args, **kwargs)
        return method(bound, *args, **kwargs)

    apply = flax.core.apply(call, mutable=mutable, flags={"initializing": True})
    return functools.partial(apply, variables, rngs=rngs)
