"""A pytree as nested dicts of names, those of ``flax.serialization.to_state_dict``, and back.

A checkpoint has names, not types. Here both sides of an upgrade get the same form: the names of
dict entries, fields and positions as keys, and as leaves the arrays, or what represents one array
(`ScaledArray` and the forms of stored moments). Empty containers are left out, because not every
file format keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from jfp8.checkpoint.changes import spelled
from jfp8.optim.stored_state import is_stored

Path: TypeAlias = tuple[str, ...]
Nested: TypeAlias = dict[str, Any]

# No model is as deep; Python's own limit would end in a RecursionError.
_DEEPEST = 100


def nested(tree: Any, path: Path = ()) -> Any:
    """`tree`, a state dict or any pytree, as nested dicts without empty ones; or the leaf itself.

    NNX variables become their values. Messages say the `path` of what the caller was given.

    Raises:
      ValueError: a key that is neither a string nor an int, or two of one name; more than 100
        levels.
    """
    if len(path) > _DEEPEST:
        raise ValueError(
            f"The tree is more than {_DEEPEST} levels deep, at {spelled(path[:6])}/...: it is not "
            "a checkpoint of a model."
        )
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    children = None if is_stored(tree) else _children(tree, path)
    if children is None:
        return tree
    found: Nested = {}
    for name, child in children:
        if name in found:
            raise ValueError(f"{spelled(path)} has two entries called {name!r}.")
        inner = nested(child, (*path, name))
        if not (isinstance(inner, dict) and not inner):
            found[name] = inner
    return found


def rebuilt(target: Any, values: Mapping[Path, Any]) -> Any:
    """A tree of the structure of `target` with the leaves `values`, by their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(target, is_leaf=_is_leaf)
    new = []
    for keys, leaf in leaves:
        value = values[tuple(map(_name, keys))]
        new.append(leaf.replace(value) if isinstance(leaf, nnx.Variable) else value)
    return structure.unflatten(new)


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dicts, with their paths."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, child in tree.items():
        yield from walk(child, (*path, name))


def at(tree: Any, path: Path) -> Any:
    """What is at `path` of nested dicts; None if nothing is."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def put(tree: Nested, path: Path, value: Any) -> Nested:
    """`tree` with the entry at `path` replaced by `value`."""
    if not path:
        return value
    return {**tree, path[0]: put(tree[path[0]], path[1:], value)}


def optimizer_states(target: Any) -> frozenset[Path]:
    """Where optimizer states are: the outermost tuples, and what is called ``opt_state``."""
    found = set()
    is_leaf = lambda x: _is_leaf(x) or isinstance(x, tuple)
    for keys, leaf in jax.tree_util.tree_flatten_with_path(target, is_leaf=is_leaf)[0]:
        path = tuple(map(_name, keys))
        if "opt_state" in path:
            found.add(path[: path.index("opt_state") + 1])
        elif isinstance(leaf, tuple) and not _is_leaf(leaf):
            found.add(path)
    return frozenset(found)


def described(x: Any) -> str:
    """What `x` is, in a few characters: ``float32[3,4]``."""
    if isinstance(x, dict):
        names = sorted(x)[:3]
        return f"a dict with {', '.join(map(repr, names))}{', ...' if len(x) > 3 else ''}"
    if is_stored(x):
        return f"{described(x.data)} with scales"
    if hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return f"an object of Python's {type(x).__name__}"


def _is_leaf(node: Any) -> bool:
    return isinstance(node, nnx.Variable) or is_stored(node)


def _children(tree: Any, path: Path) -> list[tuple[str, Any]] | None:
    """Names and nodes in `tree`; None if it is a leaf."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        for name in tree:
            if not isinstance(name, str | int):
                raise ValueError(
                    f"{spelled(path)} has the key {str(name)[:60]!r} of type "
                    f"{type(name).__name__}: names in a checkpoint are strings."
                )
        return [(str(name), child) for name, child in tree.items()]
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if len(children) == 1 and not children[0][0]:
        return None
    return [(_name(keys[0]), child) for keys, child in children]


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
