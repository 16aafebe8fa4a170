"""Turn functions that take NNX modules, and may change them, into functions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jfp8.layers.nnx.products import Product


def has_nnx(arguments: Any) -> bool:
    """Look for a module, or another object of NNX, among the arguments."""
    return any(map(_is_nnx, jax.tree.leaves(arguments, is_leaf=_is_nnx)))


def calling(
    function: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Call ``function(*args, **kwargs)`` through `run`, which takes functions of pytrees only.

    ``run(pure, *arguments)`` returns ``(pure(*arguments), more)``. Returns ``(results, more)``, and
    updates NNX objects among the arguments as `function` does.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_nnx)
    objects = {i: x for i, x in enumerate(leaves) if _is_nnx(x)}
    others = {i: x for i, x in enumerate(leaves) if i not in objects}
    graph, state = nnx.split(objects)

    def pure(state: Any, others: dict[int, Any]) -> Any:
        copies = nnx.merge(graph, state, copy=True)
        _name_products(list(copies.values()))
        given = [x for _, x in sorted({**others, **copies}.items())]
        args, kwargs = jax.tree.unflatten(structure, given)
        return function(*args, **kwargs), nnx.state(copies)

    (results, after), more = run(pure, state, others)
    nnx.update(objects, after)
    return results, more


def _is_nnx(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _name_products(objects: list[Any]) -> None:
    """Give products without a path the one that they have in their model."""
    for one in objects:
        for path, node in nnx.iter_graph(one):
            if isinstance(node, Product) and not node.path:
                node.path = "/".join(map(str, path[:-1]))
