"""State dicts: the nested dicts with arrays as leaves that a checkpoint holds.

They are those of ``flax.serialization.to_state_dict``: keys are strings, named tuples and
dataclasses go by their fields, tuples and lists by "0", "1", and so on. NNX states and typed random
keys, which Flax's function leaves as they are, become dicts and arrays, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx, serialization

Path = tuple[str, ...]

# Deeper trees are none of a model. Python itself stops at a thousand calls.
MOST_DEPTH = 100
MOST_DIMENSIONS = 64  # of numpy

_OF_NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
)
_OF_ML_DTYPES = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 uint4 int2 uint2"
)
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in _OF_NUMPY.split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _OF_ML_DTYPES.split()},
}
"""What an element may be, by the name of the dtype. Nothing here holds Python objects."""

# Largest byte of dtypes that use a part of it. numpy and ml_dtypes define no value for others.
_LARGEST_BYTE = {
    "bool": 1,
    "float6_e2m3fn": 63,
    "float6_e3m2fn": 63,
    "float4_e2m1fn": 15,
    "uint4": 15,
    "uint2": 3,
}


def state_dict(tree: Any) -> Any:
    """Any pytree that Flax can serialize, and NNX states in it, as nested dicts with string keys.

    Leaves stay as they are, but random keys become uint32 arrays. A single leaf stays one.
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
    """The state dict `state` with numpy arrays for its arrays, checked to be one that can be saved.

    Raises:
      TypeError: a leaf is neither an array of one of `DTYPES` nor a number, a string or None.
      ValueError: `state` is empty or too deep; an array is spread over several processes.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"A checkpoint holds a tree whose leaves have names, but got {type(state).__name__}. "
            'Pass one: jfp8.checkpoint.save(path, {"x": x}). For an NNX model, save its state: '
            "jfp8.checkpoint.save(path, nnx.state(model))."
        )
    found = list(flatten(state))
    if all(isinstance(leaf, dict) for _, leaf in found):
        raise ValueError("The tree has no leaves: there is nothing to save.")
    for path, leaf in found:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{spelled(path)} is sharded over several processes, each with a part. Save it "
                "with Orbax, which writes parts: ocp.StandardCheckpointer().save(path, state)."
            )
    leaves = jax.device_get([leaf for _, leaf in found])
    return unflatten((path, _of_host(path, x)) for (path, _), x in zip(found, leaves, strict=True))


def _of_host(path: Path, leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, dict) or type(leaf) in (bool, float, str):
        return leaf
    if type(leaf) is int:
        if not -(2**63) <= leaf < 2**64:
            raise ValueError(f"{spelled(path)} = {leaf} has more than the 64 bits of a checkpoint.")
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | complex):
        array = np.asarray(leaf)
        if array.dtype.name in DTYPES:
            return array.astype(DTYPES[array.dtype.name], copy=False)  # bytes in the usual order
        kind = f"an array of {array.dtype}"
    else:
        kind = f"of type {type(leaf).__name__}"
    raise TypeError(
        f"{spelled(path)} is {kind}, which a checkpoint cannot hold. It can hold arrays of numbers "
        f"({', '.join(DTYPES)}), bool, int, float, str and None. Register containers of your own "
        "with flax.serialization.register_serialization_state."
    )


def array_of_bytes(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array whose bytes are `raw`, uint8[n]; ``ValueError`` if they are none of its kind."""
    expected = math.prod(shape) * dtype.itemsize
    if raw.size != expected:
        raise ValueError(f"{dtype}{list(shape)} takes {expected} bytes, but there are {raw.size}")
    largest = _LARGEST_BYTE.get(dtype.name, 255)
    if largest < 255 and raw.size and raw.max() > largest:
        raise ValueError(f"the byte {raw.max()} is no {dtype}")
    return raw.view(dtype).reshape(shape)


def check_shape(shape: Any) -> tuple[int, ...]:
    """`shape`, read from a file, as a tuple; ``ValueError`` unless it is a list of sizes."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its shape is {short(shape)}, not a list of sizes")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"it has {len(shape)} dimensions; numpy has at most {MOST_DIMENSIONS}")
    return tuple(shape)


def flatten(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and leaves of a state dict, empty dicts included, in order.

    ``ValueError`` if it is deeper than `MOST_DEPTH`, or a key is no string.
    """
    if not isinstance(state, dict) or not state:
        yield path, state
        return
    if len(path) == MOST_DEPTH:
        raise ValueError(f"{spelled(path)} is nested deeper than {MOST_DEPTH} levels")
    for key, value in state.items():
        if not isinstance(key, str):
            raise ValueError(f"{spelled(path)} has the key {key!r}, which is no string")
        yield from flatten(value, (*path, key))


def unflatten(leaves: Any) -> dict[str, Any]:
    """The state dict of pairs of paths and leaves.

    ``ValueError`` if a path is there twice, goes through a leaf, or is longer than `MOST_DEPTH`.
    """
    state: dict[str, Any] = {}
    inner: set[Path] = set()
    seen: set[Path] = set()
    for path, leaf in leaves:
        if len(path) > MOST_DEPTH:
            raise ValueError(f"{spelled(path)} is nested deeper than {MOST_DEPTH} levels")
        above = [path[:end] for end in range(len(path))]
        if path in seen or path in inner or not seen.isdisjoint(above):
            raise ValueError(f"{spelled(path)} is there twice, or has something below it")
        seen.add(path)
        inner.update(above)
        if not path:
            return leaf
        node = state
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return state


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of what a parser found; ``ValueError`` if a key is there twice."""
    found = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} is there twice")
        found[key] = value
    return found


def spelled(path: Path) -> str:
    """A path as messages say it."""
    return short("/".join(path)) if path else "the tree"


def short(value: Any) -> str:
    """`value` for a message, however long whoever made the file has made it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-100:]}"
