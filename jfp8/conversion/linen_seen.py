"""The modules of a Linen model that a trace of it called: they name matmuls and are told about."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict

from jfp8.conversion.linen_attention import function_of
from jfp8.conversion.plan import Named, Plan
from jfp8.conversion.program import Program
from jfp8.conversion.selection import Decision, Selection
from jfp8.conversion.unconverted_warning import bridged_message, is_known, warn_of_nothing
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.layers.linen import layers
from jfp8.layers.linen.dot_product_attention import DotProductAttention
from jfp8.layers.linen.products import ProductModule, ProductOf
from jfp8.layers.linen.state_in_gradients import OVERWRITTEN
from jfp8.layers.options import check_operand
from jfp8.recipes import in_effect as region
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.tracing.caller import user_level

_KINDS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.Einsum, nn.ConvTranspose)
_OURS = (layers.Dense, layers.DenseGeneral, layers.Conv, layers.Einsum, layers.ConvTranspose)
_CALLS = {inspect.unwrap(kind.__call__) for kind in (*_KINDS, *_OURS)}
_PRODUCT = {"conv_general_dilated": "ConvGeneralDilated_0"}


@dataclass(frozen=True, eq=False)
class Seen:
    """Hold the modules of a model by their paths in it.

    Attributes:
      selection: decides on their matmuls.
      place: the path of the model in one that is not converted.
      shapes: the shapes of all parameters, by the module's path and their names.
      kinds: the types of all modules.
      layers: modules that multiply by one weight, such as ``nn.Dense``.
      modules: the others.
      dimensions: how many each parameter of a module has there, inside ``nn.vmap``.
      attentions: the decisions on attention between the projections of a layer.
      held: NNX modules, which are converted where they are made.
      ours: matmuls of layers of jfp8, which compute them in FP8 by themselves.
    """

    selection: Selection
    place: tuple[str, ...]
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    kinds: dict[str, type] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    dimensions: dict[str, dict[str, int]] = field(default_factory=dict)
    attentions: dict[str, Decision] = field(default_factory=dict)
    held: dict[str, type] = field(default_factory=dict)
    ours: set[str] = field(default_factory=set)

    def named(self, matmul: WeightMatmul, nth: int) -> Named:
        """Name a matmul by the module that has its weight, and say where its state is."""
        module, _, name = matmul.source.first.rpartition("/")
        place = "/".join([*self.place, *([module] if module else [])])
        product = f"DotGeneral_{name}"
        layer, path, stays = self.modules.get(module), f"{module}/{name}".lstrip("/"), ""
        if module in self.layers and name == "kernel":
            layer, path = self.layers[module], module
            product = _PRODUCT.get(matmul.primitive, "DotGeneral_0")
            is_ours = f"{module}/{product}".lstrip("/") in self.kinds  # a module of jfp8
            stays = "" if is_ours else _own_product(layer)
        product += f"_{nth}" if nth > 1 else ""
        state, kind = f"{module}/{product}".lstrip("/"), type(layer).__name__
        if any(f"{module}/".startswith(f"{held}/") for held in self.held):
            stays = "inside an NNX module, which is converted where it is made"
        stacks = self._stacks(module, name, matmul)
        return Named(state, path, layer, kind, self.selection, place, product, stacks, stays)

    def _stacks(self, module: str, name: str, matmul: WeightMatmul) -> int:
        """Return by how many axes ``nn.vmap`` has stacked the weight of a matmul."""
        whole = self.shapes.get(module, {}).get(name, ())[len(matmul.source.loops) :]
        n = len(whole) - self.dimensions.get(module, {}).get(name, len(whole))
        return n if n > 0 and np.shape(matmul.weight)[:n] == whole[:n] else 0

    @property
    def knows_all(self) -> bool:
        """Return whether all modules with parameters were called."""
        return self.kinds.keys() >= self.shapes.keys()

    def check(self, plan: Plan, *, of_init: bool = False) -> None:
        """Raise ``ValueError`` if a pattern, or in ``init`` a type, matches no layer."""
        named = [each.named for each in plan.matmuls.values()]
        self._check_selected(plan)
        shapes, around = self.shapes, {above for path in self.shapes for above in _prefixes(path)}
        possible = [f"{path}/{name}".lstrip("/") for path, own in shapes.items() for name in own]
        listed = {*around, *self.attentions, *(each.path for each in named)}
        possible += [f"{path}/attention".lstrip("/") for path in ("", *around)]
        self.selection.check_patterns(listed, [] if of_init else possible)
        if of_init and self.knows_all:
            own = [self.modules[p] for p in shapes if p in self.modules and p not in self.layers]
            layers = [*self.layers.values(), *(each.layer for each in named), *own]
            self.selection.check_types(layers)

    def _check_selected(self, plan: Plan) -> None:
        """Raise an error if a selected matmul has no place for its state, or rounds to FP8."""
        for each in plan.matmuls.values():
            kind = self.kinds.get(each.named.name, ProductModule)
            if each.decision.recipe is not None and not issubclass(kind, ProductModule):
                raise ValueError(
                    f"The module at {each.named.name!r} is called like the state of a product with "
                    "the parameter beside it. Rename one of them, or exempt the parameter from the "
                    "conversion."
                )
        for path, layer in self.layers.items():
            dtype: Any = getattr(layer, "dtype", None)
            if dtype is not None and self.selection.decide(path, layer, None).recipe is not None:
                check_operand(jax.ShapeDtypeStruct((), dtype))

    def is_complete(self, program: Program, variables: Mapping[str, Any]) -> bool:
        """Return whether the trace of `program` called all modules that have something in it.

        It has not if JAX has kept the trace of an ``nn.jit``.
        """
        read = program.weights_read()  # names of parameters may have slashes, too
        named = [(path, name) for path, own in self.shapes.items() for name in own]
        owners = {path for path, name in named if f"{path}/{name}".lstrip("/") in read}
        histories = flatten_dict(variables.get("fp8", {}))
        products = [keys[:-2] for keys in histories if keys[-1] == "amax_history"]
        products += [keys[:-1] for keys in flatten_dict(variables.get(OVERWRITTEN, {}))]
        without_weights = {"/".join(keys[:-1]) for keys in products} - self.shapes.keys()
        return self.kinds.keys() >= owners | without_weights

    def warn(self, model: Any, plan: Plan) -> None:
        """Warn, once, if nothing became FP8, if something cannot, or if scales look ahead."""
        warned = "_jfp8_warned"
        if warned in vars(model):
            return
        chosen = lambda path: self.selection.decide(path, self.modules.get(path), None).chosen
        held = {path: kind for path, kind in self.held.items() if not chosen(path)}
        plan.warn_ahead()
        if held:
            warnings.warn(bridged_message(held), UserWarning, stacklevel=user_level())
        nothing = False
        if self.knows_all and not self.ours:
            stayed = plan.decisions | self.attentions
            nothing = warn_of_nothing(type(model).__name__, stayed, plan.unused)
        if plan.ahead or held or nothing:
            object.__setattr__(model, warned, True)


def watching(seen: Seen, models: tuple[Any, ...]) -> Callable[..., Any]:
    """Make an interceptor that notes each module that is called in the innermost of `models`."""

    def intercept(next_fun, args, kwargs, context):
        module, here = context.module, region.current()
        around, n = () if here is None else here.models, len(models)
        if module.scope is None or around != models:
            if around[:n] == models and len(around) > n:  # a model that keeps its states itself
                seen.ours.add("/".join(around[n][0]))
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        result = next_fun(*args, **kwargs)
        seen.kinds.setdefault(path, type(module))
        params = meta.unbox(module.variables.get("params", {}))
        own = {name: np.ndim(x) for name, x in params.items() if not isinstance(x, Mapping)}
        seen.dimensions[path] = own
        _note_ours(seen, path, module)
        if function_of(context) in _CALLS and not isinstance(module, nn.ConvLocal):
            seen.layers[path] = _unbound(module)
            seen.kinds[path] = type(module)
        elif own and (path not in seen.modules or not is_known(type(module))):
            seen.modules[path] = _unbound(module)
        kind = vars(module).get("nnx_class")  # getattr is watched
        seen.held.update(_held(path, module) | ({path: kind} if isinstance(kind, type) else {}))
        return result

    return intercept


def _note_ours(seen: Seen, path: str, module: nn.Module) -> None:
    """Note matmuls and attention of jfp8, and whether they are in FP8."""
    recipe = vars(module).get("recipe")
    recipe = check_recipe(recipe) if isinstance(recipe, Recipe | str) else None
    if isinstance(module, ProductModule) and region.recipe_of_matmul(recipe, path) is not None:
        seen.ours.add(path)
    if isinstance(module, DotProductAttention):
        seen.attentions[path] = Decision(region.recipe_in_effect(recipe, path))


def _unbound(module: nn.Module) -> nn.Module:
    """Return a copy of a module without its variables, which belong to a trace."""
    return module.clone(parent=None, name=module.name, _deep_clone=True, _reset_names=True)


def _own_product(layer: Any) -> str:
    """Say that a layer of Flax was given another matmul; "" if not."""
    for hook in ("dot_general", "conv_general_dilated"):
        given = getattr(layer, f"{hook}_cls", None)
        if getattr(layer, hook, None) is not None or not isinstance(given, ProductOf | None):
            return f"the layer was given its own {hook}"
    return ""


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


def shapes_of(params: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of each module's parameters, by the module's path."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    flat: dict[tuple[str, ...], Any] = flatten_dict(meta.unbox(params or {}))
    for (*module, name), value in flat.items():
        found.setdefault("/".join(module), {})[name] = np.shape(value)
    return found


def _prefixes(path: str) -> list[str]:
    """Return the paths of a module and of those around it, without the model itself."""
    keys = path.split("/") if path else []
    return ["/".join(keys[:n]) for n in range(1, len(keys) + 1)]
