"""Pytrees as nested dicts of names, as in ``flax.serialization.to_state_dict``, and back.

A checkpoint has names, not types. This file gives both sides of an upgrade the same form: names of
dict entries, fields and positions as keys, and arrays and instances of `ScaledArray` as leaves.
Empty containers are omitted, because not every file format stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from jfp8.checkpoint.changes import spelled
from jfp8.checkpoint.state_dict import MOST_DEPTH, Path
from jfp8.optim.stored_state import StoredState
from jfp8.scaling.arrays import ScaledArray

Nested: TypeAlias = dict[str, Any]
Entry: TypeAlias = tuple[Path, Any]
Until: TypeAlias = Callable[[Nested], bool]


def nested(tree: Any, path: Path = ()) -> Any:
    """Convert any pytree to nested dicts without empty ones; return a leaf unchanged.

    NNX variables become their values. ``ValueError``, which names a `path`, for over 100 levels, a
    key that is neither a string nor an int, or two of one name.
    """
    if len(path) > MOST_DEPTH:
        raise ValueError(
            f"The tree is more than {MOST_DEPTH} levels deep, at {spelled(path[:6])}/...: it is "
            "not a checkpoint of a model."
        )
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, ScaledArray):
        return tree
    if isinstance(tree, Mapping):
        children = list(tree.items())
    else:
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
        if len(flat) == 1 and not flat[0][0]:
            return tree
        children = [(_name(keys[0]), child) for keys, child in flat]
    found: Nested = {}
    for name, child in children:
        if not isinstance(name, str | int):
            raise ValueError(
                f"{spelled(path)} has the key {str(name)[:60]!r} of type {type(name).__name__}: "
                "names in a checkpoint are strings."
            )
        if str(name) in found:
            raise ValueError(f"{spelled(path)} has two entries called {str(name)!r}.")
        found[str(name)] = nested(child, (*path, str(name)))
    return {k: child for k, child in found.items() if not isinstance(child, dict) or child}


def rebuilt(target: Any, values: Mapping[Path, Any]) -> Any:
    """Build a tree with the structure of `target` and the leaves `values`, by path."""

    def leaf_at(keys: tuple[Any, ...], leaf: Any) -> Any:
        value = values[tuple(map(_name, keys))]
        return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value

    return jax.tree_util.tree_map_with_path(leaf_at, target, is_leaf=_is_leaf)


def walk(tree: Any, path: Path = (), until: Until = lambda node: False) -> Iterator[Entry]:
    """Yield the leaves of nested dicts, and in their place the outermost dicts that are `until`."""
    if not isinstance(tree, dict) or until(tree):
        yield path, tree
        return
    for name, child in tree.items():
        yield from walk(child, (*path, name), until)


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
