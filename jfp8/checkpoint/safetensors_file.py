"""The safetensors format: eight bytes with the length of a header in JSON, the header, the data.

The names in it are the paths of the state dict, joined by "/". What the format has no place for is
stored as text in its ``__metadata__``, under "jfp8", where other programs may ignore it:

* numbers, strings, None and empty dicts of the tree;
* dtypes that it does not know. Their arrays are stored as bytes, U8;
* checksums: of each array with its name, dtype and shape, and of this text.

The format is read and written here, not by the library of that name: its loaders for numpy and Flax
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
from io import BufferedReader
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np

from jfp8.checkpoint.state_dict import (
    DTYPES,
    Path,
    array_of_bytes,
    check_shape,
    flatten,
    short,
    spelled,
    unflatten,
    unique,
)

_METADATA, _OURS, _OURS_CRC32 = "__metadata__", "jfp8", "jfp8_crc32"
_LONGEST_HEADER = 100_000_000  # of the library
_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn": "F4",  # two elements in a byte, the first in its lower half
}
_DTYPES = {name: DTYPES[dtype] for dtype, name in _NAMES.items()}


def write(state: dict[str, Any], file: BinaryIO) -> None:
    """Write what `on_host` returned; ``ValueError`` for a key with "/", and for complex128."""
    arrays, rest = {}, {}
    for path, leaf in flatten(state):
        name = _name(path)
        if isinstance(leaf, np.ndarray):
            arrays[name] = leaf
        else:
            rest[name] = leaf
    header: dict[str, Any] = {}
    dtypes, checksums, end = {}, {}, 0
    # As the library does: elements of any size are then aligned for whoever maps the file.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        stored, raw = _bytes_of(name, arrays[name])
        if stored == "U8" and arrays[name].dtype != np.uint8:
            dtypes[name] = arrays[name].dtype.name
        begin, end = end, end + raw.size
        shape = list(arrays[name].shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
        checksums[name] = _checksum(name, header[name], raw)
    ours = json.dumps({"nodes": rest, "dtypes": dtypes, "crc32": checksums})
    metadata = {_OURS: ours, _OURS_CRC32: str(zlib.crc32(ours.encode()))}
    text = json.dumps({_METADATA: metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(_bytes_of(name, arrays[name])[1].data)


def read(file: BufferedReader) -> dict[str, Any]:
    """The state dict that a file holds; ``ValueError`` if it is of another format, or damaged."""
    entries, metadata, size = _header(file)
    ours = _ours(metadata)
    if ours["crc32"] and ours["crc32"].keys() != entries.keys():
        others = sorted(ours["crc32"].keys() ^ entries.keys())
        raise ValueError(f"it is damaged: {short(others)} has no array or no checksum")
    leaves = [(tuple(name.split("/")), leaf) for name, leaf in ours["nodes"].items()]
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        try:
            behind, (begin, end) = end, entry["data_offsets"]
            if begin != behind or not begin <= end <= size:
                raise ValueError(
                    f"its data is said to be in bytes {begin} to {end}, but what comes before "
                    f"ends at {behind}, and all data at {size}"
                )
            dtype, shape = _type_of(entry, ours["dtypes"].get(name))
            raw = _read_bytes(file, end - begin)
            if ours["crc32"] and ours["crc32"][name] != _checksum(name, entry, raw):
                raise ValueError("it is damaged: its checksum is another")
            if entry["dtype"] == "F4":
                raw = np.stack([raw & np.uint8(15), raw >> 4], axis=-1).reshape(-1)
            leaves.append((tuple(name.split("/")), array_of_bytes(raw, dtype, shape)))
        except ValueError as error:
            raise ValueError(f"{short(name)}: {error}") from error
    if end != size:
        raise ValueError(f"{size - end} bytes of its data belong to no array")
    return unflatten(sorted(leaves, key=lambda leaf: leaf[0]))


def _name(path: Path) -> str:
    for key in path:
        if "/" in key or path == (_METADATA,):
            raise ValueError(
                f"{spelled(path)} has the key {short(key)}, but names in safetensors are keys "
                f"joined by '/', and {_METADATA!r} is taken. Rename it, or save as .msgpack."
            )
    return "/".join(path)


def _bytes_of(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The dtype in the file, and the bytes: uint8[n]."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.name == "float4_e2m1fn" and array.ndim and array.shape[-1] % 2 == 0:
        codes = flat.view(np.uint8)
        return "F4", codes[0::2] | codes[1::2] << 4
    stored = _NAMES.get(array.dtype.name, "U8")
    if array.itemsize > 1 and stored == "U8":
        raise ValueError(f"{name!r} is {array.dtype}, for which safetensors has no name.")
    return "U8" if stored == "F4" else stored, flat.view(np.uint8)


def _checksum(name: str, entry: dict[str, Any], raw: np.ndarray) -> int:
    return zlib.crc32(raw.data, zlib.crc32(f"{name} {entry['dtype']} {entry['shape']}".encode()))


def _header(file: BufferedReader) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Entries of arrays by name, the metadata, and the size of the data."""
    whole = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_read_bytes(file, 8), "little") if whole >= 8 else 0
    if whole < 8 or length > whole - 8:
        raise ValueError(f"it has {whole} bytes, fewer than its header should have")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header of {length} bytes is longer than {_LONGEST_HEADER}")
    header = parsed(_read_bytes(file, length).tobytes(), "its header")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{_METADATA} is {short(metadata)}, not a dict of strings")
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(
                f"{short(name)} is {short(entry)}, not a dict of dtype, shape and data_offsets"
            )
        offsets = entry["data_offsets"]
        if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
            raise ValueError(f"{short(name)} has the data_offsets {short(offsets)}, not two ints")
    return header, metadata, whole - 8 - length


def _ours(metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What `write` put into the metadata; empty for files of others."""
    text, checksum = metadata.get(_OURS), metadata.get(_OURS_CRC32)
    expected = None if text is None else str(zlib.crc32(text.encode("utf-8", "replace")))
    if checksum != expected:
        raise ValueError(f"{_OURS} in {_METADATA} is damaged: its checksum is another")
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
    """Parse JSON; `what` it is stands in errors."""
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {short(found)}, not a dict")
    return found


def _type_of(entry: dict[str, Any], hidden: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape of an array, if they agree with the range of its data."""
    stored, shape = entry["dtype"], check_shape(entry["shape"])
    dtype = _DTYPES.get(stored) if isinstance(stored, str) else None
    if dtype is None:
        raise ValueError(f"its dtype {short(stored)} is unknown. Known: {', '.join(_DTYPES)}")
    if hidden is not None:
        dtype = DTYPES.get(hidden) if isinstance(hidden, str) else None
        if dtype is None or dtype.itemsize != 1 or stored != "U8":
            raise ValueError(f"its dtype in {_METADATA} is {short(hidden)}, and {stored} above")
    begin, end = entry["data_offsets"]
    bits = math.prod(shape) * (4 if stored == "F4" else 8 * dtype.itemsize)
    if bits != 8 * (end - begin):
        raise ValueError(f"{stored}{short(list(shape))} is not what {end - begin} bytes hold")
    return dtype, shape


def _read_bytes(file: BufferedReader, count: int) -> np.ndarray:
    """uint8[count], the next bytes of a file."""
    raw = np.empty(count, np.uint8)
    if file.readinto(raw.data) != count:
        raise ValueError(f"it ends before {count} more bytes")
    return raw


# Files of others, which have arrays and nothing else.


def mapped(path: FilePath) -> dict[str, np.ndarray]:
    """The arrays of a file by name, mapped into memory: read only where they are used.

    Raises:
      ValueError: the file is damaged, or has a dtype that is not whole bytes.
    """
    with open(path, "rb") as file:
        entries, _, size = _header(file)
        start = file.tell()
    found = {}
    for name, entry in entries.items():
        try:
            dtype, shape = _type_of(entry, None)
            begin, end = entry["data_offsets"]
            if entry["dtype"] == "F4":
                raise ValueError("two elements share a byte, which is not read here")
            if not 0 <= begin <= end <= size:
                raise ValueError(f"its data is said to be in bytes {begin} to {end} of {size}")
        except ValueError as error:
            raise ValueError(f"{path}: {short(name)}: {error}") from error
        raw = np.memmap(path, np.uint8, "r", start + begin, (end - begin,)) if end > begin else b""
        found[name] = np.frombuffer(raw, dtype).reshape(shape)
    return found


def write_arrays(arrays: dict[str, np.ndarray], file: BinaryIO) -> None:
    """Write `arrays` as the library for PyTorch does, byte for byte."""
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        x = arrays[name]
        stored = _NAMES.get(x.dtype.name)
        if stored in (None, "F4"):
            raise ValueError(f"{name!r} is {x.dtype}, for which safetensors has no name.")
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": stored, "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
