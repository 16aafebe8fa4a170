"""Amax histories between steps: `advance` closes one step for all products of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.scaling import printing
from jfp8.scaling.history import end_step, observe
from jfp8.scaling.sink import ROLES, WIDTH, decode_amax

Collections = dict[str, Any]


def advance(fp8: Collections, sink_cotangent: Collections) -> Collections:
    """Close an optimizer step: fold in the amaxes that the step saw, and roll every history once.

    For hand-written loops; `TrainState.apply_gradients` does it by itself. Differentiate the loss
    by the ``fp8_sink`` collection, accumulate and average its cotangent with the other gradients if
    you do that, and call this once per optimizer step. Skip the call when you skip the step.

    Args:
      fp8: the ``fp8`` collection: the one given to ``apply``, or the one it returned as mutated.
      sink_cotangent: the gradient by the ``fp8_sink`` collection. A product that is missing from it
        (a frozen layer) keeps what `fp8` itself recorded.

    Returns:
      The new ``fp8`` collection, of the same structure. Non-finite amaxes do not enter it, and a
      tensor that was all zero or did not take part keeps its history.

    Raises:
      ValueError: `sink_cotangent` has a product that `fp8` lacks.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> v = model.init(jax.random.key(0), x)
    >>> loss = lambda params, sink: model.apply({**v, "params": params, "fp8_sink": sink}, x).sum()
    >>> grads, cotangent = jax.grad(loss, argnums=(0, 1))(v["params"], v["fp8_sink"])
    >>> fp8 = jfp8.advance(v["fp8"], cotangent)
    >>> fp8["DotGeneral_0"]["lhs"]["amax_history"][:3]
    Array([1., 0., 0.], dtype=float32)
    """
    amaxes, _ = decode_all(plain(sink_cotangent))
    return close_step(plain(fp8), amaxes)


def decode_all(sinks: Collections) -> tuple[Collections, jax.Array]:
    """Every sink f32[..., 3, 2050] decoded to amaxes f32[..., 3], and whether any overflowed.

    All at once: hundreds of small programs of the same shape would take long to compile.
    """
    leaves, structure = jax.tree.flatten(sinks)
    if not leaves:
        return sinks, jnp.zeros((), bool)
    leading = [leaf.shape[:-2] for leaf in leaves]
    rows = jnp.concatenate([leaf.reshape(-1, len(ROLES), WIDTH) for leaf in leaves])
    amax, overflow = decode_amax(rows)
    ends = np.cumsum([math.prod(shape) for shape in leading]).tolist()
    parts = jnp.split(amax, ends[:-1])
    decoded = [part.reshape(*shape, len(ROLES)) for part, shape in zip(parts, leading, strict=True)]
    return jax.tree.unflatten(structure, decoded), jnp.any(overflow)


def close_step(fp8: Any, amaxes: Any, path: tuple[str, ...] = ()) -> Any:
    """`advance` of amaxes that are decoded already."""
    if _is_product(fp8):
        new = dict(fp8)
        if "amax" in amaxes:
            for row, role in enumerate(ROLES):
                new[role] = observe(fp8[role], amaxes["amax"][..., row])
        return {role: end_step(state) for role, state in new.items()}
    unknown = sorted(set(amaxes) - set(fp8))
    if unknown:
        where = "/".join(path) or "the top"
        raise ValueError(
            f"sink_cotangent has {unknown} at {where}, which the fp8 collection lacks; it has "
            f"{sorted(fp8)}. Pass the two collections of the same model."
        )
    return {k: close_step(node, amaxes.get(k, {}), (*path, k)) for k, node in fp8.items()}


def plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, whatever mappings (Flax's FrozenDict, say) `tree` is made of."""
    return {k: plain(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _is_product(node: Any) -> bool:
    """Whether `node` is the state of one product, rather than a module that holds some."""
    return set(node) == set(ROLES) and all("amax_history" in node[role] for role in ROLES)


def _map_products(function: Callable[[Any], Any], fp8: Any) -> Any:
    if _is_product(fp8):
        return function(fp8)
    return {name: _map_products(function, node) for name, node in fp8.items()}


def init_sinks(fp8: Collections) -> Collections:
    """The ``fp8_sink`` collection that belongs to an ``fp8`` collection: zeros, same paths.

    Leading axes of the histories (stacked layers) become leading axes of the sinks.
    """

    def zeros(product: Any) -> Any:
        leading = product[ROLES[0]]["amax_history"].shape[:-1]
        return {"amax": jnp.zeros((*leading, len(ROLES), WIDTH), jnp.float32)}

    return _map_products(zeros, fp8)


def rescale_grad_histories(fp8: Collections, ratio: jax.Array) -> Collections:
    """`fp8` with every gradient amax multiplied by `ratio` = new / old loss scale.

    Gradients carry the loss scale, so their history must follow it, or every growth saturates.
    """
    largest = np.float32(np.finfo(np.float32).max)

    def rescale(product: Any) -> Any:
        grad = jax.tree.map(lambda a: jnp.minimum(a * ratio, largest), product["grad"])
        return {**product, "grad": grad}

    return _map_products(rescale, fp8)


def spelled_collections(collections: Any) -> str:
    """Collections as a repr shows them."""
    return "; ".join(f"{name}: {printing.tree(value)}" for name, value in collections.items())
