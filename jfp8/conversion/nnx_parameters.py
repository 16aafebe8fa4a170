"""Convert products that NNX modules compute by themselves with their parameters.

NNX has no interception of methods, so a copy of a model gets subclasses of its modules' classes,
whose methods let the operations of JAX pass by a `Follower`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jfp8.conversion import edges
from jfp8.conversion.nnx import children_of, has_adapter, nodes_of, reason_of, subclass_of
from jfp8.conversion.parameter_products import (
    Parameter,
    ParameterProduct,
    Prepared,
    followed_modules,
    following,
    mark_inside,
)
from jfp8.conversion.selection import Decision, Edge, Selection
from jfp8.conversion.unconverted_warning import is_known, own_parameters, warn_of_nothing
from jfp8.layers.nnx.hooks import ValuesOfScaledArrays, hook_of, stacked_axes
from jfp8.layers.nnx.products import DotGeneral, Product
from jfp8.products.operation import Options, State
from jfp8.recipes import in_effect as region
from jfp8.recipes.in_effect import Region, recipe_in_effect, why_in_high_precision
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.scaling.sink import ROLES

_OWN = "jfp8_own"  # the attribute of a module that has its `OwnParameter`s
_ROOT = "jfp8_root"  # that of the model as a whole
ADAPTER = "an adapter (nnx.LoRAParam)"


@dataclasses.dataclass(frozen=True)
class OwnParameter:
    """Describe a parameter by which a module may multiply."""

    place: str  # the path of the module
    keys: tuple[Any, ...]  # where the parameter is in it
    stays: Decision | None = None  # if it is known before a call that its product is not FP8
    leading: tuple[int, ...] = ()  # the sizes of the axes along which the module is stacked

    @property
    def name(self) -> str:
        """Return ``"w"``; of one in a list ``"w/0"``."""
        return "/".join(map(str, self.keys))

    @property
    def path(self) -> str:
        """Return ``"layers/0/attn/w"``."""
        return f"{self.place}/{self.name}".lstrip("/")

    @property
    def product(self) -> str:
        """Return the attribute of the module that holds the product and its state."""
        return "DotGeneral_" + "_".join(map(str, self.keys))


def own_of(module: nnx.Module) -> list[tuple[nnx.Module, OwnParameter]]:
    """List the parameters by which modules of a model may multiply themselves, and the modules."""
    nodes = list(nodes_of(module))
    found, stacks = [], _stacks(nodes)
    for path, node in nodes:
        known = is_known(type(node)) or hook_of(node) is not None
        if isinstance(node, Product) or (known and not has_adapter(node)):
            continue
        for keys, variable in _variables(node):
            value = variable.get_raw_value()
            matrix = len(getattr(value, "shape", ())) >= 2 + len(stacks[path])
            if matrix and jnp.issubdtype(value.dtype, jnp.floating):
                stays = Decision(None, ADAPTER) if isinstance(variable, nnx.LoRAParam) else None
                found.append((node, OwnParameter(path, keys, stays, stacks[path])))
    return found


def _stacks(nodes: list[tuple[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Find the axes along which modules are stacked, by path, from Flax's layers next to them.

    All parameters in a stack begin with these axes, and its layers do not declare them.
    """
    around = {path: [PurePosixPath(path), *PurePosixPath(path).parents] for path, _ in nodes}
    starts: dict[Any, Any] = {p: [] for path, node in nodes if hook_of(node) for p in around[path]}
    for path, node in nodes:
        values = [variable.get_raw_value() for _, variable in _variables(node)]
        shapes = [value.shape for value in values if hasattr(value, "shape")]
        for place in starts.keys() & around[path]:
            starts[place] += [*shapes, stacked_axes(node)] if hook_of(node) else shapes
    found = {place: os.path.commonprefix(shapes) for place, shapes in starts.items()}
    return {path: next((found[p] for p in around[path] if p in found), ()) for path in around}


def _variables(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """List the parameters that a module holds itself, or in containers."""
    for name, child in children_of(node).items():
        if isinstance(child, nnx.Param):
            yield (*path, name), child
        elif not isinstance(child, nnx.Module) or isinstance(child, (nnx.List, nnx.Dict)):
            yield from _variables(child, (*path, name))


def convert_own(model: nnx.Module, selection: Selection) -> None:
    """Make `model` compute products with its own parameters in FP8, as `selection` says, in place.

    A product and its state is made for each parameter by which a module may multiply.
    """
    owned = own_of(model)
    if not owned:
        return
    for node, _ in owned:
        setattr(node, _OWN, ())
    for node, own in owned:
        decision = selection.decide(own.path, node, None)
        if own.stays is None and decision.recipe is None:
            own = dataclasses.replace(own, stays=decision)
        if own.stays is None and not hasattr(node, own.product):
            product = DotGeneral(recipe=decision.recipe, path=own.place, leading=own.leading)
            setattr(node, own.product, nnx.data(product))
        setattr(node, _OWN, (*getattr(node, _OWN), own))
        promote: Any = getattr(node, "promote_dtype", None)
        if hook_of(node) is not None and not isinstance(promote, ValuesOfScaledArrays):
            setattr(node, "promote_dtype", ValuesOfScaledArrays(promote))  # noqa: B010
    for path, node in list(nodes_of(model)):
        known = isinstance(node, Product) or is_known(type(node))
        if not path or not known or getattr(node, _OWN, ()):
            kind = getattr(type(node), "jfp8_original", type(node))
            object.__setattr__(node, "__class__", _following(kind, selection))
    setattr(model, _ROOT, True)


@functools.cache
def _following(kind: type[nnx.Module], selection: Selection) -> type[nnx.Module]:
    namespace: dict[str, Any] = {"jfp8_original": kind, "jfp8_selection": selection}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        public = name == "__call__" or not name.startswith("_")
        own = public and getattr(nnx.Module, name, None) is not function
        if own and not isinstance(inspect.getattr_static(kind, name), staticmethod):
            namespace[name] = _entering(function, name)
    return subclass_of(kind, namespace)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Hold the paths of products whose results a call of a model returns, and log the call."""

    returned: frozenset[str]
    modules: set[str] = dataclasses.field(default_factory=set, compare=False)  # paths, that ran
    converted: set[str] = dataclasses.field(default_factory=set, compare=False)  # paths
    stayed: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # and why


def _entering(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Follow the parameters of a module through its method `function`."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(function, self, *args, **kwargs)
        here, selection = region.current(), type(self).jfp8_selection
        if here is not None and here.selection == edges.LOOKING.selection:
            return _followed(self, edges.mark_product, mark_inside, run)
        if here is not None and here.selection == selection:
            assert isinstance(here.edges, _Call)
            return _followed(self, *_how(selection, here.edges), run)
        with _explaining_stacks():
            found = _Call(_returned(self, selection, name, args, kwargs))
            recipe = DelayedScaling() if here is None else here.recipe
            inside = Region(recipe, here is None or here.enabled, selection, found)
            with region.entered(inside):
                result = _followed(self, *_how(selection, found), run)
        if inside.enabled and name == "__call__":
            _warn(self, found)
        return result

    return method


@contextlib.contextmanager
def _explaining_stacks() -> Iterator[None]:
    """Say what to type where JAX only says that axes differ in size."""
    try:
        yield
    except ValueError as error:
        said = ("axis sizes", "inconsistent sizes", "belongs to another recipe")
        if any(words in str(error) for words in said):
            error.add_note(
                "If modules of your own are stacked here, made under nnx.vmap without nnx.Linear "
                "or another layer of Flax, jfp8.convert cannot know that. Convert inside: "
                "nnx.vmap(lambda rngs: jfp8.convert(Block(rngs), recipe, exempt=())), or use a "
                'recipe without state, such as "current".'
            )
        raise


def _followed(module: nnx.Module, found: Any, prepare: Any, run: Any) -> Any:
    """Call `run`, in which products of parameters in `module` are what `found` says."""
    call = getattr(region.current(), "edges", None)
    if isinstance(call, _Call):
        call.modules.update(own.place for own in getattr(module, _OWN, ()))
    if any(inside is module for inside in followed_modules()):
        return run()
    modules, products, parameters = [], [], {}
    for _, node in nodes_of(module):
        modules.append(node)
        products += [node] if isinstance(node, Product) and node.fp8 is not None else []
        variables = dict(_variables(node)) if hasattr(node, _OWN) else {}
        for own in getattr(node, _OWN, ()):
            parameter = Parameter(node, own.place, own.name)
            for leaf in jax.tree.leaves(variables[own.keys].get_raw_value()):
                parameters[id(leaf)] = leaf, parameter
    lookup = lambda value: parameters.get(id(value), (None, None))[1]

    def enters(values: Any) -> bool:  # not where nnx.jit writes back what state it was given
        given = set(map(id, values))
        return not any(id(x) in given for p in products for x in p.histories().values())

    with following(modules, lookup, found, prepare, enters):
        return run()


def _how(selection: Selection, call: _Call) -> tuple[Callable[..., Any], Callable[..., Any]]:
    of = functools.partial
    return of(_computed, selection, call), of(_prepared, selection, call)


def _computed(selection: Selection, call: _Call, product: ParameterProduct) -> jax.Array:
    dot_general = _chosen(selection, call, product)
    if isinstance(dot_general, str):
        return product.staying(dot_general)
    return product.by(dot_general)


def _prepared(selection: Selection, call: _Call, product: ParameterProduct) -> Prepared:
    """Say how `product` is computed in the body of a loop or a checkpoint.

    A body cannot write into the model, so histories are read there only with a sink, or where none
    is recorded: one for all turns, unless the module is stacked like them.
    """
    dot_general = _chosen(selection, call, product)
    if isinstance(dot_general, str):
        return Prepared.staying(dot_general)
    recipe = recipe_in_effect(dot_general.recipe, dot_general.path)
    if recipe is None:
        return Prepared.staying(why_in_high_precision())
    histories, sink = _state_in_a_body(dot_general)
    options = Options(recipe, dot_general.implementation)
    gpu = selection.unless_slower_on
    compute = lambda inside, state: inside.in_fp8(options, State(*state), gpu)
    leading = () if histories is None else histories[ROLES[0]]["amax"].shape
    return Prepared(compute, (histories, sink), stacked=leading == product.loops)


def _state_in_a_body(product: Product) -> tuple[Any, jax.Array | None]:
    """Return histories and sink of `product`; None if there are none."""
    sink = None if product.fp8_sink is None else product.fp8_sink.get_value()
    if product.fp8 is None or region.is_overridden():
        return None, None
    histories = product.intact_histories() if sink is None else product.histories()
    zeros = jnp.zeros(histories[ROLES[0]].shape[:-1], jnp.float32)
    return {r: {"amax_history": h, "amax": zeros} for r, h in histories.items()}, sink


def _chosen(selection: Selection, call: _Call, product: ParameterProduct) -> DotGeneral | str:
    """Return what computes `product`, or why it stays as it is."""
    module, path = product.parameter.module, product.parameter.path
    own = next(own for own in getattr(module, _OWN) if own.path == path)
    edge = Edge.LOGITS if path in call.returned else None
    decision = own.stays or selection.decide(path, module, edge)
    if decision.recipe is None:
        call.stayed[path] = type(module), decision
        return decision.reason
    call.converted.add(path)
    if product.nth == 1:
        return getattr(module, own.product)
    # Such as a gradient that the module takes itself: another kind of tensors.
    without_state = DotGeneral(recipe=decision.recipe, path=own.place)
    without_state.fp8 = None
    return without_state


def _returned(
    model: nnx.Module, selection: Selection, name: str, args: Any, kwargs: Any
) -> frozenset[str]:
    """Find returned products by tracing the model without FP8, if that makes a difference."""
    if not getattr(model, _ROOT, False) or Edge.LOGITS not in selection.choices:
        return frozenset()
    graph, state = nnx.split((model, args, kwargs))
    arrays, together = edges.arrays_apart(state)

    def run(arrays: Any) -> Any:
        copy, args, kwargs = nnx.merge(graph, together(arrays))
        return edges.arrays_in(getattr(copy, name)(*args, **kwargs))

    with region.entered(edges.LOOKING):
        closed = jax.make_jaxpr(run)(arrays)
    return edges.edge_layers(closed, 0)[1]


def _warn(model: Any, call: _Call) -> None:
    if call.converted or not getattr(model, _ROOT, False):
        return
    owned = [(node, own) for _, node in nodes_of(model) for own in getattr(node, _OWN, ())]
    products = {id(getattr(node, own.product, None)) for node, own in owned}
    if any(isinstance(node, Product) and id(node) not in products for _, node in nodes_of(model)):
        return
    if call.modules.issuperset(own.place for _, own in owned):
        warn_if_unconverted(model, type(model).jfp8_selection, call.stayed)


def warn_if_unconverted(model: Any, selection: Selection, stayed: Mapping[str, Any]) -> None:
    """Warn that `model` has no product in FP8, unless the user said so; `stayed`: see `_Call`."""
    layers: dict[str, Any] = {}
    kinds, shapes = {}, {}
    for path, node in nodes_of(model):
        if (reason := reason_of(node)) is not None:
            chosen = selection.decide(path, node, None).chosen
            layers[path] = type(node), Decision(None, reason, chosen)
        for own in getattr(node, _OWN, ()):
            if own.stays is not None and own.stays.chosen:
                layers[own.path] = type(node), own.stays
            elif own.path not in stayed:
                kinds[own.place] = type(node)
                shape = jnp.shape(dict(_variables(node))[own.keys].get_raw_value())
                shapes.setdefault(own.place, {})[own.name] = shape
    warn_of_nothing(model, "nnx", {**stayed, **layers}, own_parameters(kinds, shapes))
