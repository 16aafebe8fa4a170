"""A checkpoint and the tree that it is restored into, as nested dicts of names, and back.

A checkpoint has names, not types, as ``flax.serialization.to_state_dict`` gives them. Empty
containers and None are omitted, because not every file format stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from jfp8.checkpoint.state_dict import MOST_DEPTH, Path, state_dict, unflatten, walk
from jfp8.optim.stored_state import StoredState
from jfp8.scaling.arrays import ScaledArray

Nested: TypeAlias = dict[str, Any]


def nested(saved: Any) -> Any:
    """Return the nested dicts of a checkpoint, or of any tree that Flax can serialize.

    ``ValueError`` for over 100 levels, or two entries of one name.
    """
    try:
        state = state_dict(saved)
    except RecursionError:
        raise ValueError(f"The tree is nested deeper than {MOST_DEPTH} levels.") from None
    if not isinstance(state, dict):
        return state
    found = [(path, leaf) for path, leaf in walk(state) if leaf is not None]
    return unflatten((path, leaf) for path, leaf in found if not isinstance(leaf, dict))


def nested_target(target: Any) -> Any:
    """Return the nested dicts of a tree to restore into: a `ScaledArray` is one leaf of them."""
    found = jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_leaf)
    leaves = {tuple(map(_name, keys)): leaf for keys, leaf in found}
    values = {k: x.get_value() if isinstance(x, nnx.Variable) else x for k, x in leaves.items()}
    return values[()] if () in values else unflatten(values.items())


def rebuilt(target: Any, values: Mapping[Path, Any]) -> Any:
    """Build a tree with the structure of `target` and the leaves `values`, by path."""

    def leaf_at(keys: tuple[Any, ...], leaf: Any) -> Any:
        value = values[tuple(map(_name, keys))]
        return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value

    return jax.tree_util.tree_map_with_path(leaf_at, target, is_leaf=_is_leaf)


def unboxed(saved: Any, target: Any) -> Any:
    """Return the nested dicts `saved` with arrays in place of ``{"value": array}``.

    Orbax stores an NNX variable, or a partitioned parameter of Linen, in such a box. The dict stays
    where the target has one, too, such as a module with a parameter called "value".
    """
    if not isinstance(saved, dict):
        return saved
    if saved.keys() == {"value"} and not isinstance(target, dict):
        inner = saved["value"]
        if target is not None or not isinstance(inner, dict):
            return inner
    children = target if isinstance(target, dict) else {}
    return {name: unboxed(child, children.get(name)) for name, child in saved.items()}


def at(tree: Any, path: Path) -> Any:
    """Return the entry at `path` of nested dicts; None if there is none."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def put(tree: Any, path: Path, value: Any) -> Any:
    """Return `tree` with `value` at `path`, and add missing dicts on the way."""
    if not path:
        return value
    entries = tree if isinstance(tree, dict) else {}
    return {**entries, path[0]: put(entries.get(path[0]), path[1:], value)}


def optimizer_states(target: Any) -> frozenset[Path]:
    """Return the paths of optimizer states: every ``opt_state``, and every `StoredState`."""
    found = set()
    is_leaf = lambda x: _is_leaf(x) or isinstance(x, StoredState)
    for keys, leaf in jax.tree_util.tree_flatten_with_path(target, is_leaf=is_leaf)[0]:
        path = tuple(map(_name, keys))
        if "opt_state" in path:
            found.add(path[: path.index("opt_state") + 1])
        elif isinstance(leaf, StoredState):
            found.add(path)
    return frozenset(found)


def described(x: Any) -> str:
    """Describe `x` in a few characters: ``float32[3,4]``."""
    if isinstance(x, dict):
        names = sorted(x)[:3]
        return f"a dict with {', '.join(map(repr, names))}{', ...' if len(x) > 3 else ''}"
    if isinstance(x, ScaledArray):
        return f"{described(x.data)} with scales"
    if hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return f"an object of Python's {type(x).__name__}"


def _is_leaf(node: Any) -> bool:
    return isinstance(node, nnx.Variable | ScaledArray)


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
