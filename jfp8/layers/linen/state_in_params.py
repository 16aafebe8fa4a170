"""The state of products in the ``params`` collection, and how it gets there and back.

Transformations lift the collections that they name, and in a model not written for FP8 they name
only ``params``. So inside a converted model the state of products is kept there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.core
import jax
import numpy as np
from flax.core.scope import CollectionFilter, in_filter
from flax.traverse_util import flatten_dict, unflatten_dict

from jfp8.layers.linen.state_in_gradients import NAME, OVERWRITTEN
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
    """Return the opposite of `into_params`.

    Raises:
      ValueError: the arrays are stacked, but not along their leading dimensions.
    """
    if collection == OVERWRITTEN:
        return state
    if collection == "fp8_sink":
        return state.reshape(*state.shape[:leading], len(ROLES), WIDTH)
    scalar = _scalar(state)
    if scalar.shape[-1] != 1:
        raise ValueError(
            "A converted model stacks its layers along another axis than the first one, by "
            "nn.scan or nn.vmap with variable_axes={'params': 1}, say. Amax histories can only be "
            "stacked along axis 0: change that axis, or convert with "
            "state_collection='_overwrite_with_gradient' for a loop such as that of Flax's own "
            "TrainState, or with a recipe that keeps no state, such as "
            "jfp8.recipes.Float8CurrentScaling()."
        )
    scalar = scalar.reshape(scalar.shape[:-1])
    return {**state, "amax": scalar} if isinstance(state, Mapping) else scalar


def collections_into_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """`variables` with their state, but for an ``fp8_sink`` that is mutable, also in ``params``.

    They stay where they are as well, for layers of jfp8 that look there.
    """
    params = _flat(variables.get("params", {}), keep_empty_nodes=True)
    for collection in ("fp8", "fp8_sink"):
        if collection == "fp8_sink" and in_filter(mutable, collection):
            continue
        for (*path, name), node in _flat(variables.get(collection, {})).items():
            leading = _scalar(node).ndim if collection == "fp8" else node.ndim - 2
            _, stored = place_in_params(collection, name)
            params[(*path, stored)] = into_params(node, leading)
    for (*path, name), node in _flat(variables.get(OVERWRITTEN, {})).items():
        if name == NAME:
            params[(*path, place_in_params(OVERWRITTEN, name)[1])] = node
    return {**variables, "params": unflatten_dict(params)}


def collections_out_of_params(
    variables: Mapping[str, Any], mutable: CollectionFilter
) -> dict[str, Any]:
    """`variables` with the state back in its collections; of these, those that are `mutable`."""
    params: dict[tuple[str, ...], Any] = {}
    state: dict[str, dict[tuple[str, ...], Any]] = {"fp8": {}, "fp8_sink": {}, OVERWRITTEN: {}}
    for path, node in _flat(variables.get("params", {}), keep_empty_nodes=True).items():
        collection, _, variable = path[-1].removeprefix("@").partition(".")
        if path[-1].startswith("@") and collection in state:
            leading = np.ndim(_scalar(node)) - 1
            value = from_params(node, collection, leading)
            state[collection][(*path[:-1], variable)] = value
        else:
            params[path] = node
    found = {**variables, "params": unflatten_dict(params)}
    for collection, flat in state.items():
        if flat:
            found[collection] = unflatten_dict({**_flat(found.get(collection, {})), **flat})
    return {name: tree for name, tree in found.items() if tree and in_filter(mutable, name)}


def _scalar(state: Any) -> Any:
    """Return the running maximum of a tensor's state, or the check of a product's."""
    return state["amax"] if isinstance(state, Mapping) else state


def _flat(tree: Any, **options: Any) -> dict[tuple[str, ...], Any]:
    """Paths and leaves of `tree`, where the state of one tensor is one leaf."""
    return flatten_dict(flax.core.unfreeze(tree), is_leaf=lambda _, x: _is_state(x), **options)


def _is_state(node: Any) -> bool:
    """Whether `node` is the state of one tensor, rather than a module that is called like one."""
    return set(node) == {"amax_history", "amax"} and not isinstance(node["amax"], Mapping)
