"""Folders of Orbax, which writes and reads them: in parts, by all processes of a run at once.

Orbax does not detect changed bytes of large arrays and of strings. So `write` adds checksums of all
leaves to Orbax's own metadata, and `read` compares. A folder takes its name when Orbax has written
all of it.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jfp8.checkpoint.state_dict import (
    bytes_of,
    checksum,
    is_spread,
    short,
    spelled,
    state_dict,
    walk,
)

_MARK = "_METADATA"  # Orbax writes it into every folder with a tree
_CHECKSUMS = "jfp8_crc32"
_UNKNOWN_TO_ORBAX = ("float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "uint4", "uint2")


def write(state: dict[str, Any], directory: Path) -> None:
    """Write the result of `on_host` into a new folder; raise for what Orbax cannot store."""
    ocp = _orbax()
    if directory.exists():
        raise ValueError(
            f"{directory} exists, and Orbax replaces no folder. Save each step under a name of its "
            f"own, such as {directory.name}_200, or let orbax.checkpoint.CheckpointManager name "
            "the steps and remove old ones."
        )
    _check_storable(state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeSave(state)
        metadata = {_CHECKSUMS: _checksums(state)}
        checkpointer.save(directory.absolute(), args=arguments, custom_metadata=metadata)


def read(directory: Path) -> dict[str, Any]:
    """Return the state dict in a folder that jfp8, or any other program with Orbax, wrote.

    ``ValueError`` if Orbax cannot read it, it is damaged, or its arrays do not fit into memory.
    """
    ocp = _orbax()
    if not (directory / _MARK).is_file():
        raise ValueError(f"it has no {_MARK}, which Orbax writes with a tree. {_inside(directory)}")
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.relative_to(directory)} is neither a file nor a folder")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            metadata = checkpointer.metadata(directory.absolute())
            if metadata.item_metadata is None:
                raise ValueError("it holds an object, such as a module. Save nnx.state(model)")
            tree: Any = metadata.item_metadata.tree
            _check_memory(tree)
            scalars = ocp.metadata.ScalarMetadata | ocp.metadata.StringMetadata
            how = lambda x: ocp.RestoreArgs(None if isinstance(x, scalars) else np.ndarray)
            arguments = ocp.args.PyTreeRestore(restore_args=jax.tree.map(how, tree))
            restored = state_dict(checkpointer.restore(directory.absolute(), args=arguments))
        except Exception as error:  # Orbax's, TensorStore's, JSON's, or any other's
            raise ValueError(f"Orbax cannot read it: {short(str(error))}") from error
    _check_values(restored, (metadata.custom_metadata or {}).get(_CHECKSUMS, {}))
    return restored


def _inside(directory: Path) -> str:
    """Name the checkpoints in a folder of Orbax's managers, and of its second version."""
    marks = (mark for at in ("*", "*/*") for mark in directory.glob(f"{at}/{_MARK}"))
    newest = sorted(filter(Path.is_file, marks), key=lambda mark: -mark.stat().st_mtime)[:4]
    if not newest:
        return "There is none in its folders"
    return f"Pass one of its folders, newest first: {', '.join(str(m.parent) for m in newest)}"


def _checksums(state: dict[str, Any]) -> dict[str, int]:
    """Return the checksums of all leaves but arrays of which other processes have parts."""
    found = {}
    for path, leaf in walk(state):
        name = ".".join(path)
        if isinstance(leaf, np.ndarray):
            found[name] = checksum(name, leaf.dtype.name, leaf.shape, bytes_of(leaf))
        elif not is_spread(leaf):
            found[name] = zlib.crc32(f"{name} {leaf!r}".encode())
    return found


def _check_values(state: dict[str, Any], expected: Any) -> None:
    """Raise ``ValueError`` unless `state` has the checksums that `write` stored, if it did."""
    found = _checksums(state)
    if not isinstance(expected, dict):
        raise ValueError(f"its {_CHECKSUMS} is {short(expected)}, not a dict")
    for name, number in expected.items():
        if found.get(name) != number:
            raise ValueError(f"{short(name)} is damaged: its checksum is another")


def _check_storable(state: dict[str, Any]) -> None:
    names: dict[str, tuple[str, ...]] = {}
    for path, leaf in walk(state):
        if isinstance(leaf, np.ndarray) and (not leaf.size or leaf.dtype.name in _UNKNOWN_TO_ORBAX):
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise ValueError(
                f"'{spelled(path)}' is {what}, which Orbax cannot store; .safetensors can."
            )
        # The name under which Orbax stores it. Of two, one would overwrite the other.
        other = names.setdefault(".".join(path), path)
        if other != path:
            raise ValueError(
                f"Orbax would store '{spelled(other)}' and '{spelled(path)}' under one name, with "
                "'.' for '/'. Rename one, or save as .safetensors."
            )


def _check_memory(tree: Any) -> None:
    """Refuse sizes that this machine cannot hold: an array without data reads as zeros."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", None) is not None]
    needed = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    if needed > there:
        raise ValueError(f"its arrays take {needed} bytes, and this machine has {there}")


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "A checkpoint without suffix is a folder of Orbax, which is not installed: "
            "pip install 'jfp8[checkpoint]'. Files *.safetensors need nothing more."
        ) from error
    return ocp
