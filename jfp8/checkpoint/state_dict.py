"""State dicts: the nested dicts with arrays as leaves that a checkpoint holds.

They are the result of ``flax.serialization.to_state_dict``: keys are strings, named tuples and
dataclasses go by their fields, tuples and lists by "0", "1", and so on. NNX states and typed random
keys, which Flax's function leaves unchanged, become dicts and arrays, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx, serialization

Path = tuple[str, ...]

# No model is deeper. Python's own limit is a thousand calls.
MOST_DEPTH = 100

_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 "
    "uint4 int2 uint2"
)
DTYPES = {name: np.dtype(name) for name in _DTYPES.split()}
"""The dtypes of elements, by name. None of them holds Python objects."""


def state_dict(tree: Any) -> Any:
    """Convert a pytree that Flax can serialize, NNX states included, to nested dicts.

    Keys become strings and random keys uint32 arrays; other leaves are unchanged.
    """
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    elif isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    found: Any = serialization.to_state_dict(tree)
    if isinstance(found, Mapping):
        return {str(key): state_dict(value) for key, value in found.items()}
    if isinstance(found, jax.Array) and jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(found)
    return found


def on_host(state: Any) -> dict[str, Any]:
    """Copy the arrays of a state dict to the host, and check that it can be saved, or raise.

    Arrays that are sharded over several processes stay on their devices.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"A checkpoint holds a tree whose leaves have names, but got {type(state).__name__}. "
            'Pass one: jfp8.checkpoint.save(path, {"x": x}). For an NNX model, save its state: '
            "jfp8.checkpoint.save(path, nnx.state(model))."
        )
    found = list(walk(state))
    if all(isinstance(leaf, dict) for _, leaf in found):
        raise ValueError("The tree has no leaves: there is nothing to save.")
    leaves = jax.device_get([None if is_spread(leaf) else leaf for _, leaf in found])
    return unflatten(
        (path, leaf if is_spread(leaf) else _checked(path, copy))
        for (path, leaf), copy in zip(found, leaves, strict=True)
    )


def is_spread(leaf: Any) -> bool:
    """Return True if `leaf` is an array of which this process has only shards."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _checked(path: Path, leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, dict) or type(leaf) in (bool, float, str):
        return leaf
    if type(leaf) is int:
        if not -(2**63) <= leaf < 2**64:
            raise ValueError(
                f"'{spelled(path)}' = {leaf} has more than the 64 bits of a checkpoint."
            )
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | complex):
        array = np.asarray(leaf)
        if array.dtype.name in DTYPES:
            return array.astype(DTYPES[array.dtype.name], copy=False)  # bytes in native order
        kind = f"an array of {array.dtype}"
    else:
        kind = f"of type {type(leaf).__name__}"
    raise TypeError(
        f"'{spelled(path)}' is {kind}, which a checkpoint cannot hold. It can hold arrays of "
        f"numbers ({', '.join(DTYPES)}), bool, int, float, str and None. Register your own "
        "containers with flax.serialization.register_serialization_state."
    )


def checksum(name: str, dtype: str, shape: Any, raw: np.ndarray) -> int:
    """Return the CRC-32 of an array with its name, dtype and shape; `raw` are its bytes, uint8."""
    return zlib.crc32(raw.data, zlib.crc32(f"{name} {dtype} {list(shape)}".encode()))


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, uint8[n]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def walk(
    tree: Any, path: Path = (), until: Callable[[dict[str, Any]], bool] = lambda node: False
) -> Iterator[tuple[Path, Any]]:
    """Yield paths and leaves of nested dicts, in order.

    Empty dicts count as leaves, and so do the outermost dicts for which `until` is true.
    """
    if not isinstance(tree, dict) or not tree or until(tree):
        yield path, tree
        return
    for name, child in tree.items():
        yield from walk(child, (*path, name), until)


def unflatten(leaves: Any) -> dict[str, Any]:
    """Build the state dict of pairs of paths and leaves.

    ``ValueError`` if a path occurs twice, goes through a leaf, or is longer than `MOST_DEPTH`.
    """
    state: dict[str, Any] = {}
    for path, leaf in leaves:
        if len(path) > MOST_DEPTH:
            raise ValueError(f"'{spelled(path)}' is nested deeper than {MOST_DEPTH} levels")
        node: Any = state
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or path[-1] in node:
            raise ValueError(f"'{spelled(path)}' occurs twice, or has entries below it")
        node[path[-1]] = leaf
    return state


def spelled(path: Path) -> str:
    """Return a path as text for a message: ``"params/Dense_0/kernel"``."""
    return short("/".join(map(str, path)))[1:-1] if path else "the tree"


def short(value: Any) -> str:
    """Shorten the repr of `value` for a message: it may come from a hostile file."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-100:]}"
