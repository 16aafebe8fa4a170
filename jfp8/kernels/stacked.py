"""Stack the states of matmuls: a model has one set of small kernels, not one for each matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def over_stacked(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Apply `function`, which supports leading axes, to each of `arguments`, stacking if alike."""
    alike: dict[Any, list[int]] = {}
    for i, each in enumerate(arguments):
        leaves, structure = jax.tree.flatten(each)
        # The class determines what `vmap` maps: stacked with it, all would be mapped.
        alike.setdefault((structure, *((type(x), jax.typeof(x)) for x in leaves)), []).append(i)
    results: dict[int, Any] = {}
    for places in alike.values():
        group = [arguments[i] for i in places]
        if len(group) == 1:
            results[places[0]] = function(*group[0])
            continue
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *group)
        found, structure = jax.tree.flatten(function(*stacked))
        rows = zip(*map(jnp.unstack, found), strict=True)
        results |= zip(places, map(structure.unflatten, rows), strict=True)
    return [results[i] for i in range(len(arguments))]
