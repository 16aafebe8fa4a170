"""Amax histories between steps: one entry each, for all matmuls of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.planner import planner_of
from jfp8.scaling.history import CHECK, as_read, intact_states, resume_recorded, sealed
from jfp8.scaling.sink import ROLES, WIDTH, encode_amax
from jfp8.tracing.device import current_device

Collections = dict[str, Any]


def over_products(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Apply `function`, which supports leading axes, to the `arguments` of each matmul."""
    planner = planner_of(current_device(*jax.tree.leaves(arguments)[:1]))
    return planner.over_stacked(function, arguments)


def merged(tree: Any) -> Any:
    """Return `tree`, numbers and histories after a step, so that few kernels compute them."""
    return planner_of(current_device(*jax.tree.leaves(tree)[:1])).merged(tree)


def is_product(node: Any) -> bool:
    """Return True for the state of one matmul, not for a module that contains some."""
    is_one = isinstance(node, Mapping) and set(node) - {CHECK} == set(ROLES)
    return is_one and all("amax_history" in node[role] for role in ROLES)


def map_products(function: Callable[..., Any], fp8: Any, *others: Any) -> Any:
    """Apply `function` to the state of every matmul in `fp8`, and the entries of `others`."""
    products: list[tuple[Any, ...]] = []

    def collect(path: tuple[str, ...], node: Any, *others: Any) -> Any:
        if is_product(node):
            products.append((node, *others))
            return len(products) - 1
        for other in others:
            names = other if isinstance(other, Mapping) else {"an array"}
            if unknown := sorted(set(names) - set(node)):
                raise ValueError(
                    f"sink_cotangent has {unknown} at {'/'.join(path) or 'the top'}, which the fp8 "
                    f"collection lacks; it has {sorted(node)}. Pass the two collections of the "
                    "same model."
                )
        inner = lambda name: (node[name], *(other.get(name, {}) for other in others))
        return {name: collect((*path, name), *inner(name)) for name in node}

    places = collect((), fp8, *others)
    new = over_products(function, products)
    return jax.tree.map(lambda i: new[i], places)


def init_sinks(fp8: Collections) -> Collections:
    """Return the ``fp8_sink`` collection of an ``fp8`` collection: zeros, same paths."""
    zeros = lambda product: {"amax": zero_sink(product[ROLES[0]]["amax_history"])}
    return map_products(zeros, fp8)


def zero_sink(history: jax.Array) -> jax.Array:
    """Return the sink of a matmul with histories f32[..., H]: zeros f32[..., 3, 2050]."""
    return jnp.zeros((*history.shape[:-1], len(ROLES), WIDTH), jnp.float32)


def add_recorded(sinks: Any, fp8: Any) -> Any:
    """Add the amaxes that a forward pass recorded in a mutable ``fp8`` to cotangents of sinks."""
    if not is_product(fp8):
        return {k: add_recorded(v, fp8[k]) if k in fp8 else v for k, v in sinks.items()}
    amaxes = jnp.stack([resume_recorded(fp8[role])["amax"] for role in ROLES], axis=-1)
    rows = jnp.where(amaxes[..., None] > 0, encode_amax(amaxes), 0.0)
    return {"amax": sinks["amax"] + lax.stop_gradient(rows)}


def read_by_step(fp8: Collections) -> Collections:
    """Return the ``fp8`` collection that a training step reads; see `as_read`."""

    def of_product(product: Any) -> Any:
        states = intact_states(product)
        read = as_read({role: states[role]["amax_history"] for role in ROLES})
        new = {role: {**states[role], "amax_history": read[role]} for role in ROLES}
        return sealed(new) if CHECK in product else new

    return map_products(of_product, fp8)
