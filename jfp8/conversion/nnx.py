"""Convert NNX models: a call of a converted module runs the program of the plain one as planned.

A converted model is a copy of the original, with the same modules and parameters, next to which
`Product`s hold amax histories. A call from outside traces the original code with a copy that has no
`Product`s, computes that program with FP8 matmuls, and updates the model by what the program has
changed: statistics, caches, counts of random numbers.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jfp8.conversion.nnx_layers import (
    Converted,
    Weight,
    as_plain,
    converted_of,
    graph_of,
    inside_of_attention,
    place_of,
    set_converted,
    spelled,
)
from jfp8.conversion.plan import Named, Plan, PlannedMatmul, plan_of
from jfp8.conversion.program import Program
from jfp8.conversion.run import Amaxes, States, run_planned
from jfp8.conversion.selection import Edge
from jfp8.conversion.unconverted_warning import warn_of_nothing
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.layers.nnx.products import Product, histories_to_read, record, warn_inside_linen, why_lost
from jfp8.products.operation import Observed, State
from jfp8.recipes.in_effect import why_disabled
from jfp8.tracing.notes import layer_noted

_EDGES_OF_A_PART = (Edge.IMAGE_INPUT, Edge.LOW_RANK)
TAG = "jfp8"  # names the context in which Flax follows what a call changes
_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class TracedCall:
    """Hold the program of a call of a converted module.

    Attributes:
      module: the one that is called.
      variables: all Variables of the call, the real ones.
      weights: by the path of each weight in the call, its module, and what is known of it.
    """

    module: Any
    program: Program
    variables: Sequence[nnx.Variable]
    weights: dict[str, tuple[Any, Weight]]

    @classmethod
    def of(cls, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> TracedCall:
        """Trace ``function(module, *args, **kwargs)`` with plain copies of converted modules.

        Its result is ``(result, {index of a variable: new value}, None)``; or, where it has changed
        more than values, ``(None, None, what Flax makes the result and the modules of)``.
        """
        given = module, args, kwargs
        modules, variables = graph_of(given)
        known, held = _known(modules)
        with nnx.split_context(TAG) as context:
            of = lambda ids: lambda _, variable: id(variable) in ids
            graph, weights, states, others = context.split(given, of(known), of(held), ...)
        named = {
            spelled(keys) + jax.tree_util.keystr(inner): known[id(variable)]
            for keys, variable in nnx.to_flat_state(weights)
            for inner, _ in Program.leaves_with_path(variable.get_raw_value())
        }

        def plain(weights: Any, others: Any) -> Any:
            with nnx.merge_context(TAG, inner=True) as context:
                copy = context.merge(graph, weights, states, others)
            modules, inside = graph_of(copy)
            before = [jax.tree.flatten(variable.get_raw_value()) for variable in inside]
            with as_plain(modules):
                result = function(copy[0], *copy[1], **copy[2])
            pairs = enumerate(zip(inside, before, strict=True))
            changed = {i: v.get_raw_value() for i, (v, parts) in pairs if not _holds(v, *parts)}
            if nnx.graphdef(copy, graph=True) == graph and not _has_modules(result):
                with nnx.split_context(TAG):
                    return result, changed, None  # and Flax forgets the copy
            for i, variable in enumerate(inside):
                if i not in changed:  # such as a weight that is kept in FP8
                    variable.set_raw_value(variables[i].get_raw_value())
            with nnx.split_context(TAG) as context:
                return None, None, context.split((copy, result))

        return cls(module, Program.of(plain, weights, list(named), others), variables, named)

    def plan(self) -> Plan:
        """Decide what becomes of each matmul."""
        is_whole = place_of(self.module) == ""  # a submodule does not know what gives the logits
        return plan_of(self.program, self._named, edges=Edge if is_whole else _EDGES_OF_A_PART)

    def _named(self, matmul: WeightMatmul, nth: int) -> Named:
        """Name a matmul by its weight; of several that were joined, by the first of these."""
        path, loops = matmul.source.first, len(matmul.source.loops)
        module, weight = self.weights[path]
        name = path if nth == 1 else f"{path}_{nth}"
        product, stacks = self.product(path) if nth == 1 else None, 0
        if product is not None and product.fp8 is not None:
            stacks = max(0, product.fp8["lhs"].ndim - 1 - loops)
        return Named(
            name=name,
            path=weight.path,
            layer=module,
            kind=type(module).__name__,
            selection=weight.selection,
            place=place_of(module),
            stacks=stacks,
            stays=weight.stays,
        )

    def product(self, name: str) -> Product | None:
        """Return what holds the state of a matmul, if anything does."""
        module, weight = self.weights.get(name, (None, None))
        return None if weight is None else weight.product(module)

    def states(self, plan: Plan) -> States:
        """Return the states of matmuls, stacked as the loops around them are."""
        products = {name: self.product(name) for name in plan.by_name}
        with_state = {n: p for n, p in products.items() if p is not None and p.fp8 is not None}
        found = {n: _state(product, plan.by_name[n]) for n, product in with_state.items()}
        return {name: state for name, state in found.items() if state is not None}

    def why_lost(self, states: States) -> str | None:
        """Return a warning if amaxes that are recorded with these states are lost."""
        products = (self.product(name) for name in states)
        training = (p for p in products if p is not None and p.fp8_sink is None)
        return next(filter(None, map(why_lost, training)), None)

    def update(self, amaxes: Amaxes, changed: dict[int, Any]) -> None:
        """Write the changed values and the observed amaxes into the model."""
        for i, value in changed.items():
            self.variables[i].set_raw_value(value)
        for name, observed in amaxes.items():
            product = self.product(name)
            if product is not None and product.fp8_sink is None and why_lost(product) is None:
                loops = range(observed.lhs.ndim - product.fp8["lhs"].ndim + 1)
                record(product, Observed(*(amax.max(loops) for amax in observed)))


def call(function: Any, module: Any, args: Any, kwargs: Any, is_call: bool) -> Any:
    """Compute ``function(module, *args, **kwargs)`` with FP8 matmuls."""
    warn_inside_linen(place_of(module))
    with nnx.update_context(TAG):
        traced = TracedCall.of(function, module, args, kwargs)
        plan = traced.plan()
        states = traced.states(plan)
        lost = traced.why_lost(states)
        out, amaxes = run_planned(traced.program, plan, states, if_lost=lost)
        result, changed, whole = out
        if whole is not None:
            set_converted(module, converted_of(module))  # raises where nothing can be set
            with nnx.merge_context(TAG, inner=False) as context:
                _, result = context.merge(*whole)
    traced.update(amaxes, changed or {})
    if is_call and place_of(module) == "":
        _warn(traced, plan)
    return result


def _holds(variable: nnx.Variable, before: Sequence[Any], structure: Any) -> bool:
    """Return whether a Variable holds the arrays of before; a dict in it may change in place."""
    leaves, here = jax.tree.flatten(variable.get_raw_value())
    return here == structure and all(x is y for x, y in zip(leaves, before, strict=True))


def _has_modules(tree: Any) -> bool:
    is_module = lambda x: isinstance(x, nnx.Pytree)
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _known(modules: Sequence[Any]) -> tuple[dict[int, tuple[Any, Weight]], set[int]]:
    """Find the weights of `modules`, and the state of their matmuls, by ``id``."""
    weights: dict[int, tuple[Any, Weight]] = {}
    states: set[int] = set()
    for module in modules:
        converted = converted_of(module)
        for weight in () if converted is None else converted.weights:
            variable, product = weight.of(module), weight.product(module)
            if id(variable) not in weights or product is not None:  # the one with a state wins
                weights[id(variable)] = module, weight
            states.update(map(id, graph_of(product)[1]))
    return weights, states


def _state(product: Product, planned: PlannedMatmul) -> State | None:
    """Return the state of a matmul; None if it is stacked in another way than the loops around."""
    sizes, sink = planned.stacks, product.fp8_sink
    histories = histories_to_read(product)
    leading = histories["lhs"].shape[:-1]
    if leading not in ((), sizes):
        return None
    zeros = jnp.zeros(leading, jnp.float32)
    found = {role: {"amax_history": h, "amax": zeros} for role, h in histories.items()}
    state = State(found, None if sink is None else sink.get_value())
    if leading == sizes:
        return state
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), state)


def _warn(traced: TracedCall, plan: Plan) -> None:
    """Warn if scales look ahead, or nothing becomes FP8, although nobody asked for that."""
    plan.warn_ahead()
    ours = {id(traced.product(name)) for name in traced.weights}
    others = (x for _, x in nnx.iter_graph(traced.module, graph=True) if isinstance(x, Product))
    if why_disabled() or any(id(product) not in ours for product in others):
        return
    unused = {traced.weights[name][1].path: shape for name, shape in plan.unused.items()}
    warn_of_nothing(type(traced.module).__name__, plan.decisions, unused)


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
            reason = here.reason or inside_of_attention(self)
            with layer_noted(here.path, type(self).__name__, reason):
                return function(self, *args, **kwargs)
        try:
            return call(function, self, args, kwargs, is_call)
        except _UNTRACEABLE:  # but calls of modules inside may be
            if any(weight.product(self) for weight in here.weights):  # the attribute would stay
                raise
            return function(self, *args, **kwargs)

    return method


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(x, (jax.Array, np.ndarray)) for x in jax.tree.leaves(tree))
