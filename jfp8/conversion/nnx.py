"""Convert the layers of NNX models without editing these."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jfp8.layers.nnx.attention import has_stock_attention, install_attention
from jfp8.layers.nnx.hooks import has_stock_product, hook_of, install
from jfp8.layers.nnx.products import Product
from jfp8.recipes.recipe import Recipe

# Of a layer that was left as it is: the reason, for reports.
REASON = "jfp8_stays"

Keys = tuple[Any, ...]
Module = TypeVar("Module", bound=nnx.Module)


def layers_of(module: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """List the layers of `module` that `convert_module` can convert, with their paths.

    They are in the order in which the code of their classes sets attributes, however the model was
    made; what is set otherwise follows by name. A layer that is shared appears once. Layers whose
    product is no longer Flax's, because they are of jfp8 or were given another, are left out.

    Args:
      module: any NNX model.

    Returns:
      ``[(path, layer), ...]``, with paths such as ``"layers/0/linear1"``.

    >>> import jfp8
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> [path for path, _ in jfp8.nnx.layers_of(model)]
    ['layers/0']
    """
    return [(path, node) for path, node in nodes_of(module) if has_hook_free(node)]


def convert_module(
    module: Module,
    decide: Callable[[str, nnx.Module], Recipe | None],
    *,
    attention: bool = False,
) -> Module:
    """Copy `module`; the copy computes in FP8 the layers that `decide` chooses.

    The copy has its own Variables, which hold the same arrays; `module` does not change. The
    ``nnx.Param`` state is the same, so checkpoints fit both. Stacked layers, made with
    ``nnx.vmap``, get stacked amax histories.

    Args:
      module: any NNX model.
      decide: called with path (``"layers/0/linear1"``) and layer for each of `layers_of`; returns
        the recipe of the layer, or None to leave it alone.
      attention: also ask `decide`, for each ``nnx.MultiHeadAttention``, whether attention itself,
        between its projections, becomes FP8.

    Returns:
      A module of the type of `module`.

    Raises:
      ValueError: layers that are stacked along axes other than the leading ones.

    >>> import jfp8
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> fp8 = jfp8.nnx.convert_module(model, lambda path, layer: jfp8.recipes.DelayedScaling())
    >>> type(fp8.layers[0].dot_general).__name__, type(model.layers[0].dot_general).__name__
    ('DotGeneral', 'function')
    """
    converted = nnx.clone(module, graph=True)
    copies = dict(nodes_of(converted))
    for path, node in nodes_of(module):
        if has_hook_free(node):
            recipe = decide(path, node)
            if recipe is not None:
                install(copies[path], recipe=recipe, path=path)
        elif attention and isinstance(node, nnx.MultiHeadAttention):
            recipe = decide(path, node) if has_stock_attention(node) else None
            if recipe is not None:
                install_attention(copies[path], recipe=recipe, path=path)
    return converted


def has_hook_free(node: Any) -> bool:
    """Tell whether `node` is a layer whose hook a conversion may take."""
    return has_stock_product(node) and not has_adapter(node)


def has_adapter(node: Any) -> bool:
    """Tell whether `node` holds adapters; Qwix adds them to ``jax.lax.dot_general``, not a hook."""
    return any(isinstance(child, nnx.LoRAParam) for child in children_of(node).values())


def nodes_of(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """List the modules in `module`, and their paths, in the order of definition."""
    # What only a static attribute holds is no part of the graph: a copy would share it.
    in_graph = {id(node) for _, node in nnx.iter_modules(module, graph=True)}
    for path, node in _walk(module, (), set()):
        if id(node) in in_graph:
            yield "/".join(map(str, path)), node


def reason_of(node: Any) -> str | None:
    """Say why the product of a layer is not FP8; None if it may be, or if there is none."""
    hook = hook_of(node)
    if hook is None or has_adapter(node):
        return None
    if has_stock_product(node):
        return getattr(node, REASON, "not converted")
    for name in (hook.name, f"{hook.name}_cls"):
        given = getattr(node, name, None)
        if isinstance(given, Product):
            return None
        if given is not None and not any(given is stock for stock in hook.stock):
            return f"the layer was given its own {hook.name}"
    return f"{type(node).__name__} computes its own product"


def _walk(node: Any, path: Keys, seen: set[int]) -> Iterator[tuple[Keys, Any]]:
    """Walk all objects of NNX in `node`, parents first, in the order of definition."""
    if isinstance(node, nnx.Pytree):
        if id(node) in seen:
            return
        seen.add(id(node))
        yield path, node
    children = children_of(node)
    if isinstance(node, (nnx.Pytree, Mapping)):  # whose order a copy does not keep
        place = {name: i for i, name in enumerate(attributes_of(type(node)))}
        natural = lambda name: re.sub(r"\d+", lambda n: n[0].zfill(9), str(name))  # 9 before 10
        order = lambda item: (place.get(item[0], len(place)), natural(item[0]))
        children = dict(sorted(children.items(), key=order))
    for name, child in children.items():
        yield from _walk(child, (*path, name), seen)


@functools.cache
def attributes_of(kind: type) -> tuple[str, ...]:
    """List the attributes that the methods of a class set, in the order of their code."""
    functions = (inspect.unwrap(x) for base in kind.__mro__[::-1] for x in vars(base).values())
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    steps = (step for code in codes for step in dis.get_instructions(code))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname == "STORE_ATTR"))


def children_of(node: Any) -> dict[Any, Any]:
    """Return the attributes or items of `node`, by name."""
    if isinstance(node, nnx.Pytree):
        return {k: v for k, v in vars(node).items() if not k.startswith("_pytree__")}
    if isinstance(node, nnx.Variable):
        return {}
    if isinstance(node, Mapping):
        return dict(node)
    # One level of any other container: lists, tuples, dataclasses.
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {_name(keys[0]): child for keys, child in flat if keys}


def subclass_of(kind: type[nnx.Module], namespace: dict[str, Any]) -> type[nnx.Module]:
    """Make a subclass of `kind` that looks like it, with the attributes in `namespace`."""
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    with warnings.catch_warnings():  # what Flax says about annotations, it said about `kind`
        warnings.simplefilter("ignore")
        flags = {"pytree": kind._pytree__is_pytree}
        fill = lambda body: body.update(same | namespace)
        return types.new_class(kind.__name__, (kind,), flags, fill)


def _name(key: Any) -> Any:
    return next(getattr(key, a) for a in ("idx", "key", "name") if hasattr(key, a))
