"""Folders of Orbax, which its own functions read and write.

Beside Orbax's files is one with the size and checksum of each: Orbax itself does not detect that a
file of arrays has other bytes, nor every case of one that was cut off.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jfp8.checkpoint.state_dict import Path as Names
from jfp8.checkpoint.state_dict import flatten, short, spelled, state_dict, unique

CHECKSUMS = "jfp8_checksums.json"
_MARK = "_METADATA"  # which Orbax writes into every folder with a tree
_UNKNOWN_TO_ORBAX = ("float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "uint4", "uint2")


def check_replaceable(directory: Path) -> None:
    """Raise ``ValueError`` if `directory` contains something other than a checkpoint."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / _MARK).exists():
        raise ValueError(
            f"{directory} is a folder with something other than a checkpoint in it, which saving "
            f"would delete. Choose a name inside it: {directory / 'checkpoint'}."
        )


def write(state: dict[str, Any], directory: Path) -> None:
    """Write what `on_host` returned into a new folder.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: an array that Orbax does not store.
    """
    ocp = _orbax()
    _check_storable(state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute(), state)
    sums = {str(file.relative_to(directory)): _measured(file) for file in _files(directory)}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=1))


def read(directory: Path) -> dict[str, Any]:
    """The state dict in a folder that jfp8, or any other program with Orbax, wrote.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: Orbax cannot read it; it is damaged; its arrays do not fit into memory.
    """
    ocp = _orbax()
    if not (directory / _MARK).is_file():
        raise ValueError(
            f"it has no {_MARK}, which Orbax writes into every folder with a tree. For a "
            "CheckpointManager, pass the folder of one step and item, such as 'run/100/default'"
        )
    _check_files(directory)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            metadata: Any = checkpointer.metadata(directory.absolute()).item_metadata
            args = jax.tree.map(lambda leaf: _how(ocp, leaf), metadata.tree)
            _check_memory(metadata.tree)
            restored = checkpointer.restore(directory.absolute(), restore_args=args)
        except Exception as error:  # of Orbax, TensorStore, JSON, and what hostile data reaches
            raise ValueError(f"Orbax cannot read it: {short(str(error))}") from error
    return state_dict(restored)


def _check_storable(state: dict[str, Any]) -> None:
    names: dict[str, Names] = {}
    for path, leaf in flatten(state):
        if isinstance(leaf, np.ndarray) and (not leaf.size or leaf.dtype.name in _UNKNOWN_TO_ORBAX):
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise ValueError(f"{spelled(path)} is {what}, which Orbax cannot store; .msgpack can.")
        # The name under which Orbax stores it. Of two, one would overwrite the other.
        other = names.setdefault(".".join(path), path)
        if other != path:
            raise ValueError(
                f"Orbax would store {spelled(other)} and {spelled(path)} under one name, with '.' "
                "for '/'. Rename one, or save as .msgpack."
            )


def _how(ocp: ModuleType, leaf: Any) -> Any:
    """How to restore what `leaf` is the metadata of: arrays as those of numpy."""
    if isinstance(leaf, ocp.metadata.ScalarMetadata | ocp.metadata.StringMetadata):
        return ocp.RestoreArgs()
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _check_memory(tree: Any) -> None:
    """An array whose parts are missing reads as zeros, however large it claims to be."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", None) is not None]
    needed = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    if needed > there:
        raise ValueError(f"its arrays take {needed} bytes, and this machine has {there}")


def _check_files(directory: Path) -> None:
    """Raise ``ValueError`` if a file is not as it was written, as far as that is known."""
    found = {str(file.relative_to(directory)): file for file in _files(directory)}
    if (listed := found.pop(CHECKSUMS, None)) is None:
        return
    try:
        expected = json.loads(listed.read_bytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CHECKSUMS} is damaged: {error}") from error
    if not isinstance(expected, dict) or expected.keys() != found.keys():
        raise ValueError(f"its files are not those that {CHECKSUMS} lists")
    for name, file in found.items():
        if _measured(file) != expected[name]:
            raise ValueError(f"{name} is damaged: its size or checksum is another")


def _files(directory: Path) -> list[Path]:
    """All files, those of subfolders too; ``ValueError`` for what leads out of the folder."""
    found = sorted(directory.rglob("*"))
    for path in found:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.relative_to(directory)} is neither a file nor a folder")
    return [path for path in found if path.is_file()]


def _measured(file: Path) -> dict[str, int]:
    checksum = 0
    with open(file, "rb") as opened:
        while part := opened.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
        return {"size": opened.tell(), "crc32": checksum}


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "A checkpoint without suffix is a folder of Orbax, which is not installed: "
            "pip install 'jfp8[checkpoint]'. Files *.msgpack and *.safetensors need nothing more."
        ) from error
    return ocp
