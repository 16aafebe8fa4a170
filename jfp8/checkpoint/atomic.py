"""Replacing a file or a folder so that there is a whole one at every moment.

The new one is written beside the old one, under a hidden name, and flushed to disk; then it is
renamed. A process killed before that leaves the old one as it was, and a leftover that the next
replacement removes. If two processes replace the same name at once, one of them fails.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Make or replace the file `path` with what `write` writes into the open file it is given."""
    _remove_leftovers(path)
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _to_disk(path.parent)


def replace_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Make or replace the folder `path` with the one that `write` makes.

    A folder that is not empty cannot be replaced in one step. Between the two steps that it takes,
    `whole_directory` finds the old one. `write` gets a path that does not exist yet.
    """
    _remove_leftovers(path)
    temporary, previous = _beside(path), _previous(path)
    try:
        write(temporary)
        _all_to_disk(temporary)
        if path.exists():
            _remove(previous)
            os.rename(path, previous)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if previous.exists() and not path.exists():
            os.rename(previous, path)
        raise
    _to_disk(path.parent)
    _remove(previous)


def whole_directory(path: Path) -> Path:
    """Where the last whole folder of `replace_directory` is, even if that was killed."""
    previous = _previous(path)
    return previous if previous.exists() and not path.exists() else path


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _remove_leftovers(path: Path) -> None:
    # What writes a folder may have one of its own beside, with a longer name.
    written = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.saving(\..*)?")
    removed = re.compile(rf"\.{re.escape(path.name)}\.previous\.[0-9a-f]{{8}}\.removed")
    for found in list(path.parent.iterdir()):
        if written.fullmatch(found.name) or removed.fullmatch(found.name):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


def _remove(directory: Path) -> None:
    """Remove a folder; while it has its name, no part of it is missing."""
    if directory.exists():
        doomed = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.removed")
        os.rename(directory, doomed)
        shutil.rmtree(doomed)


def _all_to_disk(path: Path) -> None:
    # Path.rglob of some versions of Python leaves out what it cannot list.
    if path.is_dir():
        for found in path.iterdir():
            _all_to_disk(found)
    _to_disk(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
