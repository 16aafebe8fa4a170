"""Flax's own format: a msgpack map, in which arrays are extensions of the format.

Flax writes the files, and `flax.serialization.from_bytes` can read them. They are read here with
checks that Flax's reader does not make: no file is trusted, and no code is run.

An array is the extension 1, which holds a msgpack list of its shape, the name of its dtype and its
bytes. An array of more than 1 GiB is a map with the parts of the flat array.
"""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import msgpack
import numpy as np
from flax import serialization

from jfp8.checkpoint.state_dict import (
    DTYPES,
    MOST_DEPTH,
    MOST_DIMENSIONS,
    Path,
    array_of_bytes,
    check_shape,
    short,
    spelled,
    unique,
)

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"


def write(state: dict[str, Any], file: BinaryIO) -> None:
    """Write what `on_host` returned."""
    file.write(serialization.to_bytes(state))


def read(file: BinaryIO) -> dict[str, Any]:
    """The state dict that a file holds; ``ValueError`` if it holds something else."""
    # No lists in a state dict: msgpack would take the memory for as many elements as one claims.
    state = _unpacked(file.read(), 0, ext_hook=_extension, object_pairs_hook=unique)
    if not isinstance(state, dict):
        raise ValueError(f"it holds {short(state)} instead of a map with names")
    return _checked(state, ())


def _unpacked(data: bytes, longest_list: int, **options: Any) -> Any:
    try:
        return msgpack.unpackb(data, max_array_len=longest_list, **options)
    except msgpack.StackError:
        raise ValueError("it is nested too deep") from None
    except msgpack.FormatError:
        raise ValueError("it is not msgpack") from None


def _extension(code: int, data: bytes) -> np.ndarray:
    if code in (_ARRAY, _SCALAR):
        return _array(data)
    if code == _COMPLEX:
        parts = _unpacked(data, 2, max_map_len=0)
        if not isinstance(parts, list) or [type(part) for part in parts] != [float, float]:
            raise ValueError(f"a complex number has the parts {short(parts)}")
        return np.asarray(complex(*parts))
    raise ValueError(f"it holds an extension of type {code}, which Flax does not write")


def _array(data: bytes) -> np.ndarray:
    parts = _unpacked(data, MOST_DIMENSIONS, raw=True, max_map_len=0)
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError(f"an array is {short(parts)}, not its shape, dtype and bytes")
    shape, name, raw = parts
    dtype = DTYPES.get(name.decode("ascii", "replace")) if isinstance(name, bytes) else None
    if dtype is None:
        raise ValueError(f"an array has the dtype {short(name)}. Known: {', '.join(DTYPES)}")
    if not isinstance(raw, bytes):
        raise ValueError(f"an array has {type(raw).__name__} in the place of its bytes")
    return array_of_bytes(np.array(memoryview(raw), np.uint8), dtype, check_shape(shape))


def _checked(node: Any, path: Path) -> Any:
    """`node` with arrays put together from their parts; nothing else may be in it."""
    if isinstance(node, dict):
        if len(path) == MOST_DEPTH:
            raise ValueError(f"{spelled(path)} is nested deeper than {MOST_DEPTH} levels")
        if _CHUNKED in node:
            return _joined(node, path)
        for key in node:
            if not isinstance(key, str):
                raise ValueError(f"{spelled(path)} has the key {short(key)}, which is not a string")
        return {key: _checked(value, (*path, key)) for key, value in node.items()}
    if node is None or isinstance(node, np.ndarray | bool | int | float | str):
        return node
    raise ValueError(f"{spelled(path)} is {short(node)}, neither an array nor a number or a string")


def _joined(node: dict[str, Any], path: Path) -> np.ndarray:
    """The array whose parts `node` has."""
    try:
        shape, chunks = _sequence(node["shape"]), _sequence(node["chunks"])
    except KeyError as missing:
        raise ValueError(f"{spelled(path)}, an array in parts, has no {missing}") from None
    sizes = check_shape(shape)
    dtypes = {chunk.dtype if isinstance(chunk, np.ndarray) else None for chunk in chunks}
    if len(dtypes) != 1 or None in dtypes or any(chunk.ndim != 1 for chunk in chunks):
        raise ValueError(f"the parts of {spelled(path)} are not flat arrays of one dtype")
    if sum(chunk.size for chunk in chunks) != math.prod(sizes):
        raise ValueError(f"the parts of {spelled(path)} do not have the elements of {shape}")
    return np.concatenate(chunks).reshape(sizes)


def _sequence(node: Any) -> list[Any]:
    """``{"0": a, "1": b}`` as a list."""
    if not isinstance(node, dict):
        raise ValueError(f"an array in parts has {short(node)} in the place of a sequence")
    return [node[str(i)] for i in range(len(node))]
