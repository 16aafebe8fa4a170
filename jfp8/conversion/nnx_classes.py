"""Classes of the modules of a converted NNX model: calls of their methods enter the conversion."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jfp8.conversion.nnx import call
from jfp8.conversion.nnx_layers import Converted, converted_of, inside_of_attention, set_converted
from jfp8.tracing.notes import layer_noted

_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def enter(module: Any, converted: Converted, kind: type | None = None) -> None:
    """Make calls of a module enter the conversion; `kind` replaces its class, if it is given."""
    kind = getattr(type(module), "jfp8_original", type(module)) if kind is None else kind
    alone = jax.tree.structure(module, is_leaf=lambda x: x is not module)
    is_pytree = not jax.tree_util.treedef_is_leaf(alone)
    object.__setattr__(module, "__class__", _entering(kind, is_pytree))
    set_converted(module, converted)


@functools.cache
def _entering(kind: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """Make a subclass of `kind` that looks like it, and whose public methods are `_method`s."""
    namespace = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace["jfp8_original"] = kind
    namespace["__reduce_ex__"] = lambda self, _: (_restored, (kind, is_pytree), vars(self).copy())
    for name in dir(kind):
        public = name == "__call__" or not name.startswith("_")
        function = inspect.getattr_static(kind, name) if public else None
        if inspect.isfunction(function) and getattr(nnx.Module, name, None) is not function:
            namespace[name] = _method(function, name == "__call__")
    with warnings.catch_warnings():  # Flax has warned of the annotations of `kind` already
        warnings.simplefilter("ignore")
        fill = lambda body: body.update(namespace)
        return types.new_class(kind.__name__, (kind,), {"pytree": is_pytree}, fill)


def _restored(kind: type[nnx.Module], is_pytree: bool) -> Any:
    return object.__new__(_entering(kind, is_pytree))


def _method(function: Callable[..., Any], is_call: bool) -> Callable[..., Any]:
    """Return a method that enters the conversion where it is called from outside."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = converted_of(self)
        if here is None or not (is_call or _has_arrays((args, kwargs))):
            return function(self, *args, **kwargs)
        if here.is_plain:
            if not is_call:
                return function(self, *args, **kwargs)
            reason = inside_of_attention(self) or here.reason
            with layer_noted(here.path, type(self).__name__, reason):
                return function(self, *args, **kwargs)
        try:
            return call(function, self, args, kwargs, is_call)
        except _UNTRACEABLE:  # but calls of modules inside may be
            if any(weight.product(self) for weight in here.weights):  # which would stay
                raise
            return function(self, *args, **kwargs)

    return method


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(x, (jax.Array, np.ndarray)) for x in jax.tree.leaves(tree))
