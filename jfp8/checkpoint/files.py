"""`save`, `load` and `restore`: checkpoints as Orbax directories and safetensors files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from jfp8.checkpoint import atomic, orbax_directory, safetensors_file
from jfp8.checkpoint.state_dict import is_spread, on_host, spelled, state_dict, walk
from jfp8.checkpoint.upgrade import upgrade
from jfp8.training.skipped import COUNTERS, tell


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Save a training state, or any tree of arrays, completely or not at all. ::

        checkpoint_100           an Orbax folder    (pip install 'jfp8[checkpoint]')
        checkpoint.safetensors   names are keys joined by "/"; PyTorch and others read it

    A checkpoint gets its name after all of it is written, so a killed process leaves nothing
    under this name, or the previous file. The next `save` removes leftovers. A folder
    is written once: give every step a separate name.

    Several processes of one run save to one folder together, each its own shards of arrays;
    only one process at a time may save to a file. Device placement is not saved.

    Args:
      path: destination; its suffix chooses the format. Missing folders are created.
      tree: a `jfp8.TrainState`, variables, an NNX state, or any other pytree that Flax can
        serialize. Its leaves: arrays, random keys, bool, int, float, str and None.

    Raises:
      ValueError: another suffix; a tree or a name that the format cannot hold; a folder of that
        name exists.
      TypeError: a leaf of another type, or not a tree.
      ImportError: Orbax is needed and not installed.

    Warns:
      UserWarning: the last 10 steps of a training state or an NNX optimizer were skipped, or the
        loss scale of a `jfp8.TrainState` is at its least value.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights.safetensors"
    >>> jfp8.checkpoint.save(path, {"w": jfp8.quantize(jnp.array([1.0, 448.0]))})
    >>> saved = jfp8.checkpoint.load(path)["w"]
    >>> saved["data"].dtype.name, saved["data"].tolist(), saved["scale"].tolist()
    ('float8_e4m3fn', [1.0, 448.0], 1.0)
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"The path comes first, save(path, tree), but got {type(path).__name__}.")
    target = Path(os.path.realpath(path))  # a link's target, so that the link stays
    is_folder = _is_folder(target)
    state = on_host(state_dict(tree))
    for names, leaf in walk(state):
        if names[-1] == COUNTERS[-1]:
            tell(leaf, tree)
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        orbax_directory.write(state, target)
        return
    if target.is_dir():
        raise ValueError(f"{target} is a folder. Choose another name for the file.")
    for names, leaf in walk(state):
        if is_spread(leaf):
            raise ValueError(
                f"'{spelled(names)}' is sharded over several processes. Save to a "
                f"folder of Orbax, which writes shards: {target.with_suffix('')}."
            )
    atomic.replace_file(target, partial(safetensors_file.write, state))


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a checkpoint without its model, as nested dicts of NumPy arrays, bit for bit.

    Reads files and folders that other programs wrote in these formats, too. No file is
    trusted, and none can run code: a truncated, damaged or malicious file is refused before
    memory is allocated for its alleged contents. Checksums detect changed bits.

    Args:
      path: see `save`.

    Returns:
      A state dict: keys are strings, tuples go by "0", "1", and named tuples by their fields;
      leaves are NumPy arrays (with dtypes of ml_dtypes), bool, int, float, str and None. `upgrade`
      puts it into a state; `restore` does both.

    Raises:
      ValueError: another suffix; an incomplete checkpoint, with the reason.
      FileNotFoundError: the checkpoint does not exist.
      ImportError: Orbax is needed and not installed.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> jfp8.checkpoint.save(path, {"step": 3, "histories": [jnp.zeros(2)]})
    >>> jfp8.checkpoint.load(path)
    {'histories': {'0': array([0., 0.], dtype=float32)}, 'step': 3}
    """
    source = Path(os.path.realpath(path))
    is_folder = _is_folder(source)
    if not source.exists():
        raise FileNotFoundError(f"There is no checkpoint {source}.")
    if is_folder and source.is_file():
        raise ValueError(
            f"{source} is a file, but a checkpoint without suffix is a folder. A file of Flax's "
            "checkpoints: saved = flax.serialization.msgpack_restore(path.read_bytes()); "
            "jfp8.checkpoint.upgrade(saved, target)."
        )
    try:
        return orbax_directory.read(source) if is_folder else safetensors_file.read(source)
    except ValueError as error:
        raise ValueError(f"{source} is not a complete checkpoint: {error}.") from error


def restore(path: str | os.PathLike[str], target: Any, *, strict: bool = False) -> Any:
    """Load a checkpoint into the structure of `target`: `load`, then `upgrade`.

    Args:
      path: see `save`.
      target: a state like the saved one, or one to convert it to, of arrays or
        ``jax.ShapeDtypeStruct``: see `upgrade`.
      strict: refuse a checkpoint that needs changes, instead of warning.

    Returns:
      A tree of the structure of `target`.

    Raises:
      ValueError: see `load`; also if more than FP8 state differs, or anything if `strict`.
      FileNotFoundError, ImportError: see `load`.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> jfp8.checkpoint.save(path, {"params": {"w": jnp.arange(2.0)}})
    >>> jfp8.checkpoint.restore(path, {"params": {"w": jnp.zeros(2)}})
    {'params': {'w': Array([0., 1.], dtype=float32)}}
    """
    return upgrade(load(path), target, strict=strict)


def _is_folder(path: Path) -> bool:
    """Return True if a checkpoint's name is of a folder; ``ValueError`` for unknown suffixes."""
    if path.suffix not in ("", ".safetensors"):
        raise ValueError(
            f"{path.name!r} has the suffix {path.suffix!r}, which no format has. Allowed: "
            "*.safetensors, and a name without a dot for a folder of Orbax, for example 'step_100'."
        )
    return not path.suffix
