"""Saving is whole or not at all, whichever call fails, and in whatever moment the process ends."""

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jfp8 import checkpoint
from jfp8.checkpoint import atomic

NAME = "checkpoint.safetensors"
# Those that touch files. Python's own `open`, which makes the new file, is not among them.
CALLS = ("open", "fsync", "close", "replace", "unlink", "listdir")


def save(path: Path, generation: int) -> None:
    checkpoint.save(path, {"step": generation, "x": np.full((64, 64), generation, np.float32)})


def generation_of(path: Path) -> int:
    """The one number that is everywhere in a file, so that a mixture would show."""
    saved = checkpoint.load(path)
    assert np.all(saved["x"] == saved["step"])
    return saved["step"]


def failing(patch: pytest.MonkeyPatch, number: int, dead: bool) -> list[str]:
    """Let one call fail (if `dead`, all later ones too), and return the functions that failed."""
    calls, failed = itertools.count(), []

    def replaced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number or (dead and failed):
                failed.append(name)
                raise OSError(errno.ENOSPC, "no space left on device")
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        patch.setattr(os, name, replaced(name, getattr(os, name)))
    return failed


@pytest.mark.parametrize("dead", [False, True], ids=["failed", "killed"])
def test_failed_or_killed_at_every_system_call(directory, monkeypatch, dead):
    """One of the two is whole, and the next save works and removes what is left."""
    path = directory / NAME
    broken: Counter[str] = Counter()
    leftovers = 0
    for number in itertools.count():
        save(path, 1)
        assert [entry.name for entry in directory.iterdir()] == [NAME]
        with monkeypatch.context() as patch:
            failed = failing(patch, number, dead)
            raised = None
            try:
                save(path, 2)
            except OSError as error:
                raised = error.errno
        if not failed:
            break
        assert raised == errno.ENOSPC, failed
        broken[failed[0]] += 1
        leftovers += len(list(directory.iterdir())) > 1
        assert generation_of(path) in (1, 2)
    assert generation_of(path) == 2
    assert broken["replace"] == 1
    assert broken["fsync"] == 2  # the file, and the folder that it is in
    assert bool(leftovers) == dead


class Broken(Exception):
    """Not an OSError, nor anything that the code could expect."""


def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(directory):
    save(directory / NAME, 1)
    for size in (0, 1, 1 << 17):

        def write_some(target, size=size):
            target.write(b"x" * size)
            raise Broken

        with pytest.raises(Broken):
            atomic.replace_file(directory / NAME, write_some)
        assert generation_of(directory / NAME) == 1
        assert {entry.name for entry in directory.iterdir()} == {NAME}


def test_only_leftovers_of_the_same_name_are_removed(directory):
    theirs = [".a.b.0123abcd.saving", ".a.saving", ".b.0123abcd.saving", "a.0123abcd.saving", "a.b"]
    for name in (*theirs, ".a.0123abcd.saving"):
        (directory / name).write_bytes(b"")
    atomic.replace_file(directory / "a", lambda file: None)
    assert {entry.name for entry in directory.iterdir()} == {*theirs, "a"}


def test_the_disk_has_it_before_it_takes_the_name(directory, monkeypatch):
    """In this order: data, then name, then the folder with the name in it."""
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        target = Path(f"/proc/self/fd/{descriptor}").resolve()
        events.append("folder" if target.is_dir() else f"data of {target.stat().st_size} bytes")
        real_fsync(descriptor)

    def replace(source, target):
        events.append("name")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(directory / NAME, 1)
    size = (directory / NAME).stat().st_size
    assert events == [f"data of {size} bytes", "name", "folder"]
