"""The state of products in the ``params`` collection, and the way there and back.

Transformations lift the collections that they name, and those of models that nobody edited name
``params`` alone. Inside of a converted model the state of its products rides there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.core
import jax
from flax.core.scope import CollectionFilter, in_filter

from jfp8.scaling.sink import ROLES, WIDTH

# State in the ``params`` collection has names of its own, and one dimension: a function that is
# mapped over parameters (nn.SpectralNorm) takes it for a bias, and leaves it alone.


def place_in_params(collection: str, name: str) -> tuple[str, str]:
    """Where a variable of a product is while its state is in the ``params`` collection."""
    return "params", f"@{collection}.{name}"


def into_params(state: Any, leading: int = 0) -> Any:
    """The value of such a variable, each array with one dimension after the `leading` ones."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:leading], -1), state)


def from_params(state: Any, collection: str, leading: int = 0) -> Any:
    """The opposite of `into_params`.

    Raises:
      ValueError: the arrays are stacked, but not along their leading dimensions.
    """
    if collection == "fp8_sink":
        return state.reshape(*state.shape[:leading], len(ROLES), WIDTH)
    if state["amax"].shape[-1] != 1:
        raise ValueError(
            "A converted model stacks its layers along another axis than the first one, by "
            "nn.scan or nn.vmap with variable_axes={'params': 1}, say. Amax histories can only be "
            "stacked along axis 0: change that axis, or convert with a recipe that keeps no state, "
            "such as jfp8.recipes.Float8CurrentScaling()."
        )
    return {**state, "amax": state["amax"].reshape(state["amax"].shape[:-1])}


def collections_into_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """`variables` with ``fp8`` and, unless it is mutable, ``fp8_sink`` also among ``params``.

    They stay where they are as well, for layers of jfp8 that look there.
    """
    params = variables.get("params", {})
    for collection in ("fp8", "fp8_sink"):
        if collection == "fp8_sink" and in_filter(mutable, collection):
            continue
        params = _with_state(params, flax.core.unfreeze(variables.get(collection, {})), collection)
    return {**variables, "params": params}


def _with_state(params: Mapping[str, Any], state: Any, collection: str) -> dict[str, Any]:
    merged = dict(params)
    for name, node in state.items():
        if collection == "fp8" and _is_state(node):
            leading = node["amax"].ndim
        elif collection == "fp8_sink" and not isinstance(node, Mapping):
            leading = node.ndim - 2
        else:
            merged[name] = _with_state(params.get(name, {}), node, collection)
            continue
        merged[place_in_params(collection, name)[1]] = into_params(node, leading)
    return merged


def _is_state(node: Any) -> bool:
    """Whether `node` is the state of one tensor, rather than a module that is called like one."""
    return set(node) == {"amax_history", "amax"} and not isinstance(node["amax"], Mapping)


def collections_out_of_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """`variables` with the state back in its collections; of these, those that are `mutable`."""
    params = flax.core.unfreeze(variables.get("params", {}))
    params, state = _without_state(params)
    found = {**variables, "params": params}
    for collection, tree in state.items():
        if tree:
            found[collection] = _deep_update(found.get(collection, {}), tree)
    return {name: tree for name, tree in found.items() if tree and in_filter(mutable, name)}


def _without_state(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    kept: dict[str, Any] = {}
    state: dict[str, Any] = {"fp8": {}, "fp8_sink": {}}
    for name, node in params.items():
        collection, _, variable = name.removeprefix("@").partition(".")
        if name.startswith("@") and collection in state:
            array = node["amax"] if collection == "fp8" else node
            state[collection][variable] = from_params(node, collection, array.ndim - 1)
        elif isinstance(node, dict):
            inner, found = _without_state(node)
            for collection, tree in found.items():
                if tree:
                    state[collection][name] = tree
            if inner or not node:
                kept[name] = inner
        else:
            kept[name] = node
    return kept, state


def _deep_update(tree: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, node in new.items():
        both = isinstance(node, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _deep_update(merged[name], node) if both else node
    return merged
