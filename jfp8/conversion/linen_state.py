"""The amax histories of a converted Linen model: views of its states in collections."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from flax.core.scope import CollectionFilter, in_filter
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from jfp8.conversion.plan import Plan, PlannedMatmul
from jfp8.conversion.run import Amaxes, States
from jfp8.layers.linen import messages
from jfp8.layers.linen.state_in_gradients import NAME, OVERWRITTEN, StateCollection
from jfp8.products.operation import State
from jfp8.scaling.history import CHECK, as_dicts, intact_states, record, state_shapes
from jfp8.scaling.sink import ROLES, init_sink
from jfp8.tracing.caller import user_level

Collections = dict[str, Any]
STATES = ("fp8", "fp8_sink", OVERWRITTEN)


def init_collections(
    plan: Plan, collection: StateCollection, mutable: CollectionFilter
) -> Collections:
    """Return empty states of all matmuls of `plan` in collections that are `mutable`."""
    found: dict[str, dict[tuple[str, ...], Any]] = {name: {} for name in STATES}
    for name, planned in plan.by_name.items():
        if not planned.has_state:
            continue
        path = tuple(name.split("/"))
        if collection == OVERWRITTEN:
            found[OVERWRITTEN][*path, NAME] = planned.init_overwritten()
            continue
        with_check = lambda recipe: {**recipe.init_state(), CHECK: jnp.zeros(())}
        found["fp8"] |= _flat(planned.init_state(with_check), path)
        found["fp8_sink"][*path, "amax"] = planned.init_state(lambda _: init_sink())
    return {
        name: unflatten_dict(flat)
        for name, flat in found.items()
        if flat and in_filter(mutable, name)
    }


def read_states(
    plan: Plan,
    collection: StateCollection,
    variables: Mapping[str, Any],
    mutable: CollectionFilter,
) -> States:
    """Return the states that `variables` hold of the matmuls of `plan`, by their names."""
    overwritten = collection == OVERWRITTEN
    if overwritten and OVERWRITTEN in variables and in_filter(mutable, OVERWRITTEN):
        warnings.warn(messages.UNCHANGED, stacklevel=user_level())
    names = (OVERWRITTEN,) if overwritten else ("fp8", "fp8_sink")
    held = {name: meta.unbox(as_dicts(variables.get(name, {}))) for name in names}
    found = {}
    for name, planned in plan.by_name.items():
        if not planned.has_state:
            continue
        path = name.split("/")
        if overwritten:
            variable = _at(held[OVERWRITTEN], [*path, NAME])
            state = State() if variable is None else planned.read_overwritten(variable)
        else:
            sink = _at(held["fp8_sink"], [*path, "amax"])
            sink = None if in_filter(mutable, "fp8_sink") else sink
            state = _read(_at(held["fp8"], path), sink)
            if in_filter(mutable, "fp8"):  # it is returned next to the loss, and nobody trains it
                state = state._replace(histories=lax.stop_gradient(state.histories))
        if state.histories is not None:
            _check_stacks(planned, state)
            found[name] = state
    return found


def _read(histories: Any, sink: Any) -> State:
    """Return histories, empty ones if they are not intact, and a sink.

    Training does not check: its next entry is right.
    """
    if histories is None:
        return State()
    if sink is None:
        histories = intact_states(histories)
    return State({role: histories[role] for role in ROLES}, sink)


def write_states(fp8: Any, states: States, observed: Amaxes) -> dict[str, Any]:
    """Return the collection ``fp8`` with what was `observed` of lhs and rhs.

    Without a sink this ``apply`` is the step; with one `advance` will end the step. If nothing was
    observed, since no derivative is taken, the collection keeps its values.
    """
    new = as_dicts(meta.unbox(fp8))
    for name, amaxes in observed.items():
        path, (histories, sink, *_) = name.split("/"), states[name]
        assert histories is not None
        product = _at(new, path)
        product.update(record(product, histories, amaxes._asdict(), at_once=sink is None))
    return meta.replace_boxed(fp8, new)


def _check_stacks(planned: PlannedMatmul, state: State) -> None:
    """Raise ``ValueError`` if a state is stacked otherwise than the loops around its matmul."""
    recipe: Any = planned.decision.recipe
    needed = jax.tree.map(lambda x: (*planned.stacks, *x.shape), state_shapes(recipe))
    given = jax.tree.map(jnp.shape, state.histories)
    if given != needed:
        raise ValueError(
            f"The state of {planned.named.name!r} has shapes {given['lhs']}, and "
            f"{needed['lhs']} is needed. It belongs to another recipe than {recipe.name!r}, or to "
            "another number of layers: make it by init."
        )


def _at(tree: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _flat(tree: Any, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    return {(*above, *path): x for path, x in flatten_dict(tree).items()}
