"""The safetensors format: eight bytes with the length of a header in JSON, the header, the data.

The names in it are the paths of the state dict, joined by "/". Values that the format cannot store
are stored as text in its ``__metadata__``, under "jfp8", where other programs may ignore it:

* numbers, strings, None and empty dicts of the tree;
* dtypes that it does not know. Their arrays are stored as bytes, U8;
* checksums: of each array with its name, dtype and shape, and of this text.

The format is read and written here, not by the safetensors library: its loaders for NumPy and Flax
have no FP8 dtypes (github.com/huggingface/safetensors/issues/682), and it silently takes the last
of two entries with the same name.

References:
  https://github.com/huggingface/safetensors, "Format"
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path as FilePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jfp8.checkpoint.state_dict import (
    DTYPES,
    Path,
    bytes_of,
    checksum,
    short,
    spelled,
    unflatten,
    walk,
)

_METADATA, _OURS, _OURS_CRC32 = "__metadata__", "jfp8", "jfp8_crc32"
_LONGEST_HEADER = 100_000_000  # limit of the library
_MOST_DIMENSIONS = 64  # limit of NumPy
# In the order of the library, whose files begin with the last. Two elements of F4 share a byte.
_OF_NUMPY = (
    "bool float4_e2m1fn uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz "
    "float8_e5m2fnuz int16 uint16 float16 bfloat16 int32 uint32 float32 complex64 float64 int64 "
    "uint64"
)
_OF_LIBRARY = (
    "BOOL F4 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 "
    "C64 F64 I64 U64"
)
_NAMES = dict(zip(_OF_NUMPY.split(), _OF_LIBRARY.split(), strict=True))
_DTYPES = {name: DTYPES[dtype] for dtype, name in _NAMES.items()}
# Largest byte of dtypes that use only some codes. NumPy and ml_dtypes define no value for others.
_LARGEST_BYTE = {
    "bool": 1,
    "float6_e2m3fn": 63,
    "float6_e3m2fn": 63,
    "float4_e2m1fn": 15,
    "uint4": 15,
    "uint2": 3,
}


class _Stored(NamedTuple):
    """An array as stored in a file: the format's name of its dtype, shape and bytes, uint8[n]."""

    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray


def write(state: dict[str, Any], file: BinaryIO) -> None:
    """Write the result of `on_host`; ``ValueError`` for a key with "/", and for complex128."""
    leaves = {_name(path): leaf for path, leaf in walk(state)}
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    stored = {name: _stored(name, array) for name, array in arrays.items()}
    ours = {
        "nodes": {name: leaf for name, leaf in leaves.items() if name not in arrays},
        "dtypes": {n: x.dtype.name for n, x in arrays.items() if _is_hidden(stored[n], x)},
        "crc32": {name: checksum(name, *entry) for name, entry in stored.items()},
    }
    text = json.dumps(ours)
    _write(stored, arrays, {_OURS: text, _OURS_CRC32: str(zlib.crc32(text.encode()))}, file)


def write_arrays(arrays: dict[str, np.ndarray], file: BinaryIO) -> None:
    """Write `arrays` like the library for PyTorch, byte for byte."""
    stored = {name: _stored(name, array) for name, array in arrays.items()}
    for name, array in arrays.items():
        if stored[name].dtype == "F4" or _is_hidden(stored[name], array):
            raise _unnamed(name, array)
    _write(stored, arrays, {"format": "pt"}, file)


def _write(
    stored: dict[str, _Stored],
    arrays: dict[str, np.ndarray],
    metadata: dict[str, str],
    file: BinaryIO,
) -> None:
    # The library's order: elements of any size are then aligned if the file is mapped.
    place = list(_DTYPES).index
    order = sorted(arrays, key=lambda name: (-place(stored[name].dtype), name))
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name in order:
        dtype, shape, raw = stored[name]
        begin, end = end, end + raw.size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(stored[name].raw.data)


def _is_hidden(stored: _Stored, array: np.ndarray) -> bool:
    """Return True if the format has no name for the dtype of an array."""
    return stored.dtype == "U8" and array.dtype != np.uint8


def _stored(name: str, array: np.ndarray) -> _Stored:
    raw = bytes_of(array)
    dtype = _NAMES.get(array.dtype.name, "U8")
    if array.itemsize > 1 and dtype == "U8":
        raise _unnamed(name, array)
    if dtype == "F4" and array.ndim and array.shape[-1] % 2 == 0:
        raw = joined_nibbles(raw)
    elif dtype == "F4":
        dtype = "U8"
    return _Stored(dtype, array.shape, raw)


def joined_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack two codes of four bits into a byte, along the last axis; the first in the lower half."""
    codes = codes.view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def split_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the codes in `packed` bytes, uint8: the inverse of `joined_nibbles`."""
    codes = np.stack([packed & np.uint8(15), packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _unnamed(name: str, array: np.ndarray) -> ValueError:
    return ValueError(f"{name!r} is {array.dtype}, for which safetensors has no name.")


def _name(path: Path) -> str:
    for key in path:
        if "/" in key or path == (_METADATA,):
            raise ValueError(
                f"'{spelled(path)}' has the key {short(key)}, but names in safetensors are keys "
                f"joined by '/', and {_METADATA!r} is taken. Rename it, or save to a folder."
            )
    return "/".join(path)


def read(path: FilePath) -> dict[str, Any]:
    """Return the state dict in a file; ``ValueError`` if it has another format or is damaged."""
    entries, metadata = _entries(path)
    ours = _ours(metadata)
    checksums = ours["crc32"]
    if checksums and checksums.keys() != entries.keys():
        others = sorted(checksums.keys() ^ entries.keys())
        raise ValueError(f"it is damaged: {short(others)} has no array or no checksum")
    leaves = list(ours["nodes"].items())
    for name, entry in entries.items():
        if checksums and checksums[name] != checksum(name, *entry):
            raise ValueError(f"{short(name)}: it is damaged: its checksum differs")
        leaves.append((name, _array(name, entry, ours["dtypes"].get(name)).copy()))
    leaves.sort(key=lambda item: item[0])
    return unflatten((tuple(name.split("/")), leaf) for name, leaf in leaves)


def read_arrays(path: FilePath) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, mapped into memory: read only when used.

    ``ValueError`` if the file is damaged, or has a dtype that is not whole bytes.
    """
    try:
        entries, _ = _entries(path)
        for name, entry in entries.items():
            if entry.dtype == "F4":
                raise ValueError(f"{short(name)}: two elements share a byte, which is not read")
        return {name: _array(name, entry) for name, entry in entries.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _array(name: str, entry: _Stored, hidden: Any = None) -> np.ndarray:
    """Return the array of an entry, whose own dtype is `hidden` if the format does not know it."""
    dtype, raw = _DTYPES[entry.dtype], entry.raw
    if hidden is not None:
        dtype = DTYPES.get(hidden) if isinstance(hidden, str) else None
        if dtype is None or dtype.itemsize != 1 or entry.dtype != "U8":
            what = f"its dtype in {_METADATA} is {short(hidden)}, and {entry.dtype} in the header"
            raise ValueError(f"{short(name)}: {what}")
    if entry.dtype == "F4":
        raw = split_nibbles(raw)
    largest = _LARGEST_BYTE.get(dtype.name, 255)
    if largest < 255 and raw.size and raw.max() > largest:
        raise ValueError(f"{short(name)}: the byte {raw.max()} is no {dtype}")
    return raw.view(dtype).reshape(entry.shape)


def _entries(path: FilePath) -> tuple[dict[str, _Stored], dict[str, str]]:
    """Return the arrays of a file, whose data is not read yet, and its metadata."""
    size = os.stat(path).st_size
    whole = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
    length = int.from_bytes(whole[:8].tobytes(), "little")
    if size < 8 or length > size - 8:
        raise ValueError(f"it has {size} bytes, fewer than its header should have")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header of {length} bytes is longer than {_LONGEST_HEADER}")
    header, data = parsed(whole[8 : 8 + length].tobytes(), "its header"), whole[8 + length :]
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{_METADATA} is {short(metadata)}, not a dict of strings")
    for name, entry in header.items():
        _check_entry(name, entry)
    found, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        before, (begin, end) = end, entry["data_offsets"]
        if begin != before or not begin <= end <= data.size:
            raise ValueError(
                f"{short(name)}: its data is said to be in bytes {begin} to {end}, but what comes "
                f"before ends at {before}, and all data at {data.size}"
            )
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        bits = 4 if dtype == "F4" else 8 * _DTYPES[dtype].itemsize
        if math.prod(shape) * bits != 8 * (end - begin):
            what = f"{dtype}{short(list(shape))} does not match {end - begin} bytes"
            raise ValueError(f"{short(name)}: {what}")
        found[name] = _Stored(dtype, shape, data[begin:end])
    if end != data.size:
        raise ValueError(f"{data.size - end} bytes of its data belong to no array")
    return found, metadata


def _check_entry(name: str, entry: Any) -> None:
    """Raise ``ValueError`` unless `entry` has a known dtype, a shape and two offsets."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{short(name)} is {short(entry)}, not a dict of dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise ValueError(f"{short(name)} has the data_offsets {short(offsets)}, not two ints")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"{short(name)}: its dtype {short(dtype)} is unknown. Known: {known}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{short(name)}: its shape is {short(shape)}, not a list of sizes")
    if len(shape) > _MOST_DIMENSIONS:
        most = f"NumPy has at most {_MOST_DIMENSIONS}"
        raise ValueError(f"{short(name)}: it has {len(shape)} dimensions; {most}")


def _ours(metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the metadata that `write` added; empty for files of other programs."""
    text, checksum = metadata.get(_OURS), metadata.get(_OURS_CRC32)
    expected = None if text is None else str(zlib.crc32(text.encode("utf-8", "replace")))
    if checksum != expected:
        raise ValueError(f"{_OURS} in {_METADATA} is damaged: its checksum differs")
    found = {} if text is None else parsed(text, f"{_OURS} in {_METADATA}")
    parts = {part: found.get(part, {}) for part in ("nodes", "dtypes", "crc32")}
    for part, value in parts.items():
        if not isinstance(value, dict):
            raise ValueError(f"{part} of {_OURS} in {_METADATA} is {short(value)}, not a dict")
    for name, leaf in parts["nodes"].items():
        if leaf is not None and leaf != {} and not isinstance(leaf, bool | int | float | str):
            raise ValueError(f"{short(name)} is {short(leaf)}, neither a number nor a string")
    return parts


def parsed(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a dict in JSON, which errors call `what`."""
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {short(found)}, not a dict")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} occurs twice")
        found[key] = value
    return found
