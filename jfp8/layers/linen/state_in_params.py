"""The state of matmuls in the ``params`` collection: how it moves there and back, and who sees it.

Transformations lift the collections that they name, and in a model not written for FP8 they name
only ``params``. So a converted model stores the state of matmuls there, invisible to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.core
import jax
import numpy as np
from flax.core.scope import CollectionFilter, in_filter, union_filters
from flax.traverse_util import flatten_dict, unflatten_dict

from jfp8.layers.linen.state_in_gradients import NAME, OVERWRITTEN
from jfp8.scaling.sink import ROLES, WIDTH
from jfp8.tracing.compat import filters_of_lift, scopes_of_lift

APART = "fp8_state"  # where a converted model sees the state that is in ``params``
_STORED = tuple(f"@{collection}." for collection in ("fp8", "fp8_sink", OVERWRITTEN))


class StateApart(flax.core.Scope):
    """A scope of a converted model, which sees its state in `APART` instead of ``params``.

    So do transformations that lift all other collections next to ``params``, and may pass these to
    functions of the user: ``nn.map_variables``, ``nn.vjp``.
    """

    def __hash__(self) -> int:
        """Return the hash of this scope; scopes derived from it by a lift become of this kind."""
        for scope in scopes_of_lift():
            keep_apart(scope)
        return super().__hash__()

    def variables(self) -> Any:
        """Return the collections of this scope, as `state_apart`."""
        return state_apart(super().variables())

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """Return a variable, or all of a child's, without the state in its ``params``."""
        value = super().get_variable(col, name, default)
        return state_apart({col: value}).get(col, {}) if isinstance(value, Mapping) else value

    def push(self, *args: Any, **options: Any) -> flax.core.Scope:
        """Return a child, a scope of this kind."""
        return keep_apart(super().push(*args, **options))

    def rewound(self, *args: Any, **options: Any) -> flax.core.Scope:
        """Return this scope at its beginning, a scope of this kind."""
        return keep_apart(super().rewound(*args, **options))

    @property
    def _variables(self) -> Any:  # pyrefly: ignore
        """Return the collections, for lifted transformations with the state if they support it."""
        variables, filters = vars(self)["_variables"], filters_of_lift()
        params, state = ([in_filter(one, col) for one in filters] for col in ("params", APART))
        # A custom derivative may not depend on values that are not its arguments.
        if not any(params) or any(part.startswith("custom_vjp(") for part in self.debug_path):
            return variables
        if not any(state):
            return _state_within(variables)
        loses = in_filter(self.mutable, "params") and not in_filter(self.mutable, APART)
        return variables if state == params or loses else state_apart(variables)


def keep_apart(scope: Any) -> Any:
    """Turn `scope`, which Flax created, into a `StateApart`."""
    if type(scope) is flax.core.Scope:
        scope.__class__ = StateApart
        # `APART` is returned from it if it is mutable in the caller, which Flax determines.
        mapped = "".join(scope.debug_path[-1:]).startswith(("map_variables(", "vjp(", "jvp("))
        if scope.parent is None and in_filter(scope.mutable, "params") and not mapped:
            scope.mutable = union_filters(scope.mutable, APART)
    return scope


def place_of(scope: Any, collection: str, name: str) -> tuple[str, str]:
    """Return the place of a variable of a matmul while its state is in ``params``, or `APART`."""
    stored = f"@{collection}.{name}"
    return APART if scope.has_variable(APART, stored) else "params", stored


def into_params(state: Any, leading: int = 0) -> Any:
    """Return the value of such a variable, each array with one dimension after the `leading`."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:leading], -1), state)


def from_params(state: Any, collection: str, leading: int = 0) -> Any:
    """Invert `into_params`, or raise ``ValueError`` if arrays are stacked along a later axis."""
    if collection == OVERWRITTEN:
        return state
    if collection == "fp8_sink":
        return state.reshape(*state.shape[:leading], len(ROLES), WIDTH)
    scalar = _scalar(state)
    if scalar.shape[-1] != 1:
        raise ValueError(
            "A converted model stacks its layers along another axis than the first one, by "
            "for example by variable_axes={'params': 1} of nn.scan. Amax histories can only be "
            "stacked along axis 0: change that axis, or convert with "
            "state_collection='_overwrite_with_gradient' for a loop such as Flax's own "
            "TrainState, or with a recipe without state, such as "
            "jfp8.recipes.Float8CurrentScaling()."
        )
    scalar = scalar.reshape(scalar.shape[:-1])
    return {**state, "amax": scalar} if isinstance(state, Mapping) else scalar


def collections_into_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """Return `variables` with their state also in ``params``, except a mutable ``fp8_sink``.

    They stay in their collections as well, for layers of jfp8 that look there.
    """
    state = {}
    for collection in ("fp8", "fp8_sink", OVERWRITTEN):
        if collection == "fp8_sink" and in_filter(mutable, collection):
            continue
        for (*path, name), node in _flat(variables.get(collection, {})).items():
            if collection != OVERWRITTEN:
                leading = _scalar(node).ndim if collection == "fp8" else node.ndim - 2
                node = into_params(node, leading)
            if collection != OVERWRITTEN or name == NAME:
                state[(*path, f"@{collection}.{name}")] = node
    return _state_within({**variables, APART: unflatten_dict(state)})


def collections_out_of_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """Return `variables` with the state back in its collections; only `mutable` ones."""
    found = dict(state_apart(variables))
    for (*path, stored), node in _flat(found.pop(APART, {})).items():
        collection, _, variable = stored.removeprefix("@").partition(".")
        leading = np.ndim(_scalar(node)) - 1
        value = {(*path, variable): from_params(node, collection, leading)}
        found[collection] = unflatten_dict({**_flat(found.get(collection, {})), **value})
    return {name: tree for name, tree in found.items() if tree and in_filter(mutable, name)}


def state_apart(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `variables` with the state from ``params`` in `APART` instead, which is newer."""
    params = _flat(variables.get("params", {}), keep_empty_nodes=True)
    state = {path: params.pop(path) for path in list(params) if path[-1].startswith(_STORED)}
    if not state:
        return variables
    apart = unflatten_dict({**state, **_flat(variables.get(APART, {}))})
    return {**variables, "params": unflatten_dict(params), APART: apart}


def _state_within(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return `variables` with the state from `APART` in ``params`` instead."""
    params = _flat(variables.get("params", {}), keep_empty_nodes=True)
    within = unflatten_dict({**params, **_flat(variables.get(APART, {}))})
    return {**{col: variables[col] for col in variables if col != APART}, "params": within}


def _scalar(state: Any) -> Any:
    """Return the running maximum of a tensor's state, or the check of a matmul's."""
    return state["amax"] if isinstance(state, Mapping) else state


def _flat(tree: Any, **options: Any) -> dict[tuple[str, ...], Any]:
    """Return paths and leaves of `tree`, with the state of one tensor as one leaf."""
    flat = flatten_dict(flax.core.unfreeze(tree), is_leaf=lambda _, x: _is_state(x), **options)
    return {path: node for path, node in flat.items() if path}


def _is_state(node: Any) -> bool:
    """Return True if `node` is the state of one tensor, not a module with the same name."""
    return set(node) == {"amax_history", "amax"} and not isinstance(node["amax"], Mapping)
