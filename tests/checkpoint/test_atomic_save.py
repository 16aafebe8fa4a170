"""Saving is whole or not at all: killed at every system call and at many moments, and on errors.

This file is also the program that is killed. It forks, which JAX allows no process that has begun
to compute, so that it imports `jfp8` late.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

NAME = "checkpoint"
PART = 1 << 16


# What is written: one number everywhere, so that a mixture shows


def write_file(generation: int, file: Any) -> None:
    for _ in range(4):
        file.write(bytes([generation]) * PART)


def generation_of_file(path: Path) -> int:
    content = path.read_bytes()
    assert content == content[:1] * 4 * PART
    return content[0]


def tree_of(generation: int) -> dict[str, Any]:
    import ml_dtypes
    import numpy as np

    array = np.full((128, 128), generation % 7 + 1, np.float32)
    return {
        "step": generation,
        "params": {"w": array.astype(ml_dtypes.float8_e4m3fn), "b": array[0]},
        "moments": {str(i): array + i for i in range(4)},
    }


def path_of(path: Path, generation: int) -> Path:
    """A file is replaced; folders have names of their own."""
    return path if path.suffix else path.with_name(f"{path.name}_{generation}")


def newest_of(path: Path) -> int:
    """The newest generation that is there, after a look at all of them."""
    import numpy as np

    from jfp8 import checkpoint

    found = []
    for entry in path.parent.iterdir():
        if entry.name.startswith(".") or "orbax-checkpoint-tmp" in entry.name:
            continue
        saved = checkpoint.load(entry)
        expected = tree_of(saved["step"])
        assert entry == path_of(path, saved["step"])
        assert saved.keys() == expected.keys()
        for part in ("params", "moments"):
            for name, array in expected[part].items():
                np.testing.assert_array_equal(saved[part][name], array)
        found.append(saved["step"])
    return max(found)


# The program: forks a process, kills it, looks at what is there


def fork(run: Callable[[], None]) -> int:
    """A process that does `run` and ends with 0; with 1 if that raises."""
    if child := os.fork():
        return child
    try:
        run()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def make(path: Path, generation: int) -> None:
    from jfp8.checkpoint import atomic

    atomic.replace_file(path, partial(write_file, generation))


def save_again_and_again(path: Path, first: int, telling: int) -> None:
    from jfp8 import checkpoint

    for generation in itertools.count(first):
        checkpoint.save(path_of(path, generation), tree_of(generation))
        os.write(telling, b".")


def tell_what_is_there(path: Path, telling: int) -> None:
    os.write(telling, newest_of(path).to_bytes(4))


def kill_at_moments(path: Path, kills: int) -> None:
    """Kill a process that saves again and again, and tells when it has done so.

    What is there then is what it saved last, or what it was saving.
    """
    from jfp8 import checkpoint

    if not path.suffix:
        import orbax.checkpoint  # noqa: F401  once and not in every process

    moments, done = random.Random(0), 0
    found: Counter[str] = Counter()
    for _ in range(kills):
        reading, telling = os.pipe()
        begun = time.monotonic()
        child = fork(partial(save_again_and_again, path, done + 1, telling))
        os.close(telling)
        done += len(os.read(reading, 1))
        time.sleep(moments.uniform(0, 2 * (time.monotonic() - begun)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while told := os.read(reading, 1 << 10):
            done += len(told)
        os.close(reading)
        found["leftovers"] += len(list(path.parent.iterdir())) > 1

        reading, telling = os.pipe()
        _, status = os.waitpid(fork(partial(tell_what_is_there, path, telling)), 0)
        os.close(telling)
        generation = int.from_bytes(os.read(reading, 4))
        os.close(reading)
        assert status == 0
        assert generation in (done, done + 1), (generation, done)
        found["new" if generation > done else "old"] += 1
        done = generation
    os.waitpid(fork(lambda: checkpoint.save(path_of(path, done + 1), tree_of(done + 1))), 0)
    whole = {path_of(path, generation) for generation in range(1, done + 2)}
    assert set(path.parent.iterdir()) == whole
    print(json.dumps({"kills": kills, "saves": done, **found}), flush=True)


# The tests


def run(*arguments: Any) -> list[dict[str, Any]]:
    import jfp8

    root = Path(jfp8.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kills"), [("x.safetensors", 50), ("x", 15)], ids=["safetensors", "orbax"]
)
def test_killed_at_many_moments(directory, name, kills):
    if name == "x":
        pytest.importorskip("orbax.checkpoint")
    (found,) = run(directory / name, kills)
    print(found)
    assert found["kills"] == kills
    assert found["saves"] >= kills
    assert found["leftovers"] > 0  # some were killed while they wrote


# Calls that fail, as those of a full or broken disk do, and calls of a process that is killed

CALLS = (
    *("open", "fsync", "close", "replace", "rename", "unlink", "rmdir", "mkdir"),
    *("listdir", "scandir"),
)


class Failing:
    """The functions of `os` that touch files, of which the call of one number fails.

    If `dead`, all later ones fail, too: the disk stays as it is in the moment of a kill.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, dead: bool) -> None:
        self.calls, self.number, self.dead, self.failed = 0, number, dead, None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.number or (self.dead and self.failed):
                self.failed = self.failed or name
                raise OSError(errno.ENOSPC, "no space left on device")
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("dead", [False, True], ids=["failed", "killed"])
def test_failed_or_killed_at_every_system_call(directory, monkeypatch, dead):
    """One of the two is whole, and the next replacement works and removes what is left."""
    path = directory / NAME
    failed: Counter[str] = Counter()
    leftovers = 0
    for number in itertools.count():
        make(path, 1)
        assert [entry.name for entry in directory.iterdir()] == [NAME]
        with monkeypatch.context() as patch:
            failing = Failing(patch, number, dead)
            raised = None
            try:
                make(path, 2)
            except OSError as error:
                raised = error.errno
        if failing.failed is None:
            break
        assert raised == errno.ENOSPC, failing.failed
        failed[failing.failed] += 1
        leftovers += len(list(directory.iterdir())) > 1
        assert generation_of_file(path) in (1, 2)
    assert generation_of_file(path) == 2
    assert failed["replace"] == 1
    assert failed["fsync"] == 2  # the file, and the folder that it is in
    assert bool(leftovers) == dead


class Broken(Exception):
    """Not an OSError, nor anything that the code could expect."""


def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(directory):
    from jfp8.checkpoint import atomic

    make(directory / NAME, 1)
    for parts in (0, 1, 2):

        def write_some(target, parts=parts):
            target.write(b"x" * parts * PART)
            raise Broken

        with pytest.raises(Broken):
            atomic.replace_file(directory / NAME, write_some)
        assert generation_of_file(directory / NAME) == 1
        assert {entry.name for entry in directory.iterdir()} == {NAME}


def test_only_leftovers_of_the_same_name_are_removed(directory):

    theirs = [".a.b.0123abcd.saving", ".a.saving", ".b.0123abcd.saving", "a.0123abcd.saving", "a.b"]
    for name in (*theirs, ".a.0123abcd.saving"):
        (directory / name).write_bytes(b"")
    make(directory / "a", 1)
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
    make(directory / NAME, 1)
    assert events == [f"data of {4 * PART} bytes", "name", "folder"]


if __name__ == "__main__":
    kill_at_moments(Path(sys.argv[1]), int(sys.argv[2]))
