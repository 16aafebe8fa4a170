"""`save`, `load` and `restore`: checkpoints in three formats, chosen by the name of the file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from jfp8.checkpoint import atomic, msgpack_file, orbax_directory, safetensors_file
from jfp8.checkpoint.state_dict import on_host, state_dict
from jfp8.checkpoint.upgrade import upgrade

_FILES: dict[str, ModuleType] = {".msgpack": msgpack_file, ".safetensors": safetensors_file}


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Save a training state, or any tree of arrays, completely or not at all. ::

        checkpoint.msgpack       Flax's format: flax.serialization.from_bytes reads it
        checkpoint.safetensors   names are keys joined by "/"; PyTorch and others read it
        checkpoint               a folder of Orbax (pip install 'jfp8[checkpoint]')

    The new checkpoint is written beside the old one and flushed to disk before it gets its name.
    Whenever the process is killed, the old one or the new one is there. The next `save` removes
    what was left half written, under a hidden name. One process at a time may save to a path.

    Arrays are copied to the host, with all their bits. Device placement is not saved.

    Args:
      path: where to; its suffix chooses the format. Missing folders are made.
      tree: a `jfp8.TrainState`, variables, an NNX state, or any other pytree that Flax can
        serialize. Its leaves: arrays, random keys, bool, int, float, str and None.

    Raises:
      ValueError: another suffix; a tree or a name that the format cannot hold; `path` is a folder
        with something else in it.
      TypeError: a leaf of another type, or not a tree.
      ImportError: Orbax is needed and not installed.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights.safetensors"
    >>> jfp8.checkpoint.save(path, {"w": jfp8.quantize(jnp.array([1.0, 448.0]))})
    >>> saved = jfp8.checkpoint.load(path)["w"]
    >>> saved["data"].dtype.name, saved["data"].tolist(), saved["scale"].tolist()
    ('float8_e4m3fn', [1.0, 448.0], 1.0)
    """
    target = _resolved(path)
    file_format = _format_of(target)
    state = on_host(state_dict(tree))
    target.parent.mkdir(parents=True, exist_ok=True)
    if file_format is None:
        orbax_directory.check_replaceable(target)
        atomic.replace_directory(target, partial(orbax_directory.write, state))
    elif target.is_dir():
        raise ValueError(f"{target} is a folder. Choose another name for the file.")
    else:
        atomic.replace_file(target, partial(file_format.write, state))


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` saved, as nested dicts of numpy arrays, bit for bit.

    Files that other programs wrote in these formats can be read too. No file is trusted, and none
    can run code: a file that is cut off, damaged or malicious is refused before memory is allocated
    for what it claims to hold. Checksums in a safetensors file and in a folder detect every changed
    bit; msgpack has none, so a number whose bits were changed is read as another number.

    Args:
      path: as for `save`.

    Returns:
      A state dict: keys are strings, tuples go by "0", "1", and named tuples by their fields;
      leaves are numpy arrays (with dtypes of ml_dtypes), bool, int, float, str and None. `upgrade`
      puts it into a state; `restore` does both.

    Raises:
      ValueError: another suffix; not a whole checkpoint, and why.
      FileNotFoundError: there is none.
      ImportError: Orbax is needed and not installed.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.msgpack"
    >>> jfp8.checkpoint.save(path, {"step": 3, "histories": [jnp.zeros(2)]})
    >>> jfp8.checkpoint.load(path)
    {'step': 3, 'histories': {'0': array([0., 0.], dtype=float32)}}
    """
    source = _resolved(path)
    file_format = _format_of(source)
    if file_format is None:
        source = atomic.whole_directory(source)
        if source.is_file():
            raise ValueError(
                f"{source} is a file, but a checkpoint without suffix is a folder of Orbax. "
                f"{_ALLOWED}"
            )
        if not source.exists():
            raise FileNotFoundError(f"There is no checkpoint {source}.")
    try:
        if file_format is None:
            return orbax_directory.read(source)
        with open(source, "rb") as file:
            return file_format.read(file)
    except ValueError as error:
        raise ValueError(f"{source} is not a complete checkpoint: {error}.") from error


def restore(path: str | os.PathLike[str], target: Any, *, strict: bool = False) -> Any:
    """A checkpoint in the structure of `target`: `load`, then `upgrade`.

    Args:
      path: as for `save`.
      target: a state like the saved one, or one that it is converted to: see `upgrade`. Its arrays
        may be ``jax.ShapeDtypeStruct``; of these only shape and dtype are read.
      strict: refuse a checkpoint that would have to be changed, instead of warning of each kind of
        change.

    Returns:
      A tree of the structure of `target`.

    Raises:
      ValueError: as for `load`; something other than FP8 state differs, or anything if `strict`.
      FileNotFoundError: there is none.
      ImportError: Orbax is needed and not installed.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.msgpack"
    >>> jfp8.checkpoint.save(path, {"params": {"w": jnp.arange(2.0)}})
    >>> jfp8.checkpoint.restore(path, {"params": {"w": jnp.zeros(2)}})
    {'params': {'w': Array([0., 1.], dtype=float32)}}
    """
    return upgrade(load(path), target, strict=strict)


_ALLOWED = (
    "Allowed: *.msgpack, *.safetensors, and a name without a dot for a folder of Orbax, for "
    "example 'step_100'."
)


def _resolved(path: str | os.PathLike[str]) -> Path:
    """`path` without links, so that the target of a link is replaced, not the link."""
    return Path(os.path.realpath(path))


def _format_of(path: Path) -> ModuleType | None:
    """What reads and writes files of this name; None for a folder."""
    if not path.suffix:
        return None
    if path.suffix not in _FILES:
        raise ValueError(
            f"{path.name!r} has the suffix {path.suffix!r}, which no format has. {_ALLOWED}"
        )
    return _FILES[path.suffix]
