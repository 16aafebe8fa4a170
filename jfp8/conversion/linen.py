"""Convert Linen models without editing them: the front door for `program`, `plan` and `run`.

A converted model is an instance of a subclass of its class. A call from outside traces the call of
the original, computes its program with FP8 matmuls, and keeps their states in collections.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import flax.linen as nn
import jax
from flax.core.scope import CollectionFilter, DenyList

from jfp8.conversion.linen_call import Call, as_class
from jfp8.conversion.selection import Selection
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region
from jfp8.recipes.recipe import Recipe

_ALL_BUT_INTERMEDIATES = DenyList("intermediates")  # what Flax's `init` initializes


def convert_module(
    model: nn.Module, selection: Selection, on_init: Callable[..., None] | None = None
) -> nn.Module:
    """Return `model` as an instance of a subclass of its class, whose calls are converted.

    ``model.init`` ends with ``on_init(model, variables, *args, **kwargs)``.
    """
    original = getattr(type(model), "jfp8_original", type(model))
    return as_class(model, _converted_class(original, selection, on_init))


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
    """Convert where a model is called from outside; a base of converted classes."""

    jfp8_selection: ClassVar[Selection]
    jfp8_original: ClassVar[type[nn.Module]]
    jfp8_on_init: ClassVar[Callable[..., None] | None]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model that was converted, with what it was converted by."""
        cls, model = type(self), self
        if model.scope is not None:  # pyrefly: ignore
            return super().__reduce_ex__(protocol)
        original = as_class(model, cls.jfp8_original)  # pyrefly: ignore
        return convert_module, (original, cls.jfp8_selection, cls.jfp8_on_init)

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
        cls = type(self)
        call = Call.of(self, cls.jfp8_selection)
        original = functools.partial(call.model.init_with_output, mutable=mutable)
        create = lambda: original(rngs, *args, **kwargs)
        if region.why_disabled():
            y, variables = create()
        else:
            y, variables = call.init(create, args, rngs, mutable, kwargs)
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
