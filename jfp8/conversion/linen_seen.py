"""The modules of a Linen model that a trace of it called: they name matmuls and are told about."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict

from jfp8.conversion.linen_attention import function_of
from jfp8.conversion.plan import Named, Plan
from jfp8.conversion.selection import Decision, Selection
from jfp8.conversion.unconverted_warning import (
    bridged_message,
    is_known,
    own_parameters,
    warn_of_nothing,
)
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.layers.linen import layers
from jfp8.layers.linen.products import ProductModule
from jfp8.tracing.caller import user_level

_KINDS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.Einsum, nn.ConvTranspose)
_OURS = (layers.Dense, layers.DenseGeneral, layers.Conv, layers.Einsum, layers.ConvTranspose)
_CALLS = {inspect.unwrap(kind.__call__) for kind in (*_KINDS, *_OURS)}
_PRODUCT = {"conv_general_dilated": "ConvGeneralDilated_0"}  # of others "DotGeneral_0"


@dataclass(frozen=True)
class Seen:
    """Hold the modules of a model by their paths in it.

    Attributes:
      place: the path of the model in one that is not converted.
      kinds: the types of all modules.
      layers: modules with one matmul of their own, such as ``nn.Dense``; of each the number of
        dimensions of its kernel.
      modules: the others.
      attentions: what was decided on attention between the projections of a layer.
      bridged: NNX modules, which nothing reaches.
    """

    place: tuple[str, ...] = ()
    kinds: dict[str, type] = field(default_factory=dict)
    layers: dict[str, tuple[nn.Module, int]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attentions: dict[str, Decision] = field(default_factory=dict)
    bridged: dict[str, type] = field(default_factory=dict)

    def named(self, matmul: WeightMatmul, nth: int) -> Named:
        """Name a matmul by the module that has its weight, and say where its state is."""
        module, _, name = matmul.source.path.split("+")[0].rpartition("/")
        place = "/".join([*self.place, *([module] if module else [])])
        times = f"_{nth}" if nth > 1 else ""
        layer, stacks = self.modules.get(module), 0
        path, product = f"{module}/{name}".lstrip("/"), f"DotGeneral_{name}{times}"
        if module in self.layers and name == "kernel":
            layer, dimensions = self.layers[module]
            path = module
            product = _PRODUCT.get(matmul.primitive, "DotGeneral_0") + times
            stacks = np.ndim(matmul.weight) - dimensions if matmul.source.is_whole else 0
        own = self.kinds.get(f"{module}/{product}".lstrip("/"), ProductModule)
        if not issubclass(own, ProductModule):
            raise ValueError(
                f"The module at {f'{module}/{product}'.lstrip('/')!r} is called like the state of "
                "a product with the parameter beside it. Rename one of them, or exempt the "
                "parameter from the conversion."
            )
        state = f"{module}/{product}".lstrip("/")
        return Named(state, path, layer, type(layer).__name__, place, product, max(stacks, 0))

    def check(
        self, selection: Selection, params: Any, plan: Plan, *, of_init: bool = False
    ) -> None:
        """Raise ``ValueError`` if a pattern, or in ``init`` a type, matches no layer."""
        named = [each.named for each in plan.matmuls.values()]
        shapes = _shapes(params)
        possible = [f"{path}/{name}".lstrip("/") for path, own in shapes.items() for name in own]
        listed = {*_paths(params), *self.attentions, *(each.path for each in named)}
        if of_init:
            possible = []
        else:
            possible += [f"{path}/attention".lstrip("/") for path in ("", *_paths(params))]
        selection.check_patterns(listed, possible)
        if of_init and self.knows_all(params):
            selection.check_types([*(each.layer for each in named), *self.modules.values()])

    def knows_all(self, params: Any) -> bool:
        """Return whether all modules with parameters were called."""
        return all(path in self.kinds for path in _shapes(params))

    def warn(self, model: Any, params: Any, plan: Plan) -> None:
        """Warn, once, if nothing became FP8, if something cannot, or if scales look ahead."""
        warned = "_jfp8_warned"
        if warned in vars(model):
            return
        planned = list(plan.matmuls.values())
        told = bool(plan.ahead or self.bridged)
        plan.warn_ahead()
        if self.bridged:
            warnings.warn(bridged_message(self.bridged), UserWarning, stacklevel=user_level())
        decided = [*(each.decision for each in planned), *self.attentions.values()]
        converted = any(decision.recipe is not None for decision in decided)
        if not self.bridged and not converted and self.knows_all(params) and not self.has_ours():
            stayed = {
                each.named.path: (type(each.named.layer), each.decision) for each in planned
            } | {path: (nn.Module, decision) for path, decision in self.attentions.items()}
            multiplied = {each.weight.rpartition("/")[0] for each in planned}
            kinds = {path: kind for path, kind in self.kinds.items() if path not in multiplied}
            told |= warn_of_nothing(model, "linen", stayed, own_parameters(kinds, _shapes(params)))
        if told:
            object.__setattr__(model, warned, True)

    def has_ours(self) -> bool:
        """Return whether a layer of jfp8 computes FP8 matmuls by itself."""
        return any(issubclass(kind, ProductModule) for kind in self.kinds.values())


def watching(seen: Seen) -> Callable[..., Any]:
    """Make an interceptor that notes each module that is called."""

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        result = next_fun(*args, **kwargs)
        seen.kinds.setdefault(path, type(module))
        if function_of(context) in _CALLS and not isinstance(module, nn.ConvLocal):
            _note_layer(seen, path, module)
        elif path not in seen.modules or not is_known(type(module)):
            seen.modules[path] = module
        found = {path: vars(module).get("nnx_class"), **_held(path, module)}  # getattr is watched
        seen.bridged.update((p, kind) for p, kind in found.items() if isinstance(kind, type))
        return result

    return intercept


def _note_layer(seen: Seen, path: str, module: Any) -> None:
    kernel = meta.unbox(module.variables.get("params", {}).get("kernel"))
    seen.layers[path] = module, np.ndim(kernel)
    seen.kinds[path] = type(module)


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


def _shapes(params: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each module's parameters, by the module's path."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    flat: dict[tuple[str, ...], Any] = flatten_dict(meta.unbox(params or {}))
    for (*module, name), value in flat.items():
        found.setdefault("/".join(module), {})[name] = np.shape(value)
    return found


def _paths(params: Any) -> set[str]:
    """Return the paths of all modules that have parameters, or hold modules that do."""
    flat: Mapping[Any, Any] = flatten_dict(params or {})
    return {"/".join(keys[:n]) for keys in flat for n in range(1, len(keys))}
