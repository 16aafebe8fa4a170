"""Saving is whole or not at all: killed at every line, at many moments, and with failing calls.

This file is also the program that is killed. It forks, which JAX allows no process that has begun
to compute, so that it imports `jfp8` late or, where only files are replaced, not at all.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def write_folder(generation: int, folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    for name in ("first", "inner/second", "inner/third"):
        (folder / name).write_bytes(bytes([generation]) * 1000)


def generation_of_file(path: Path) -> int:
    content = path.read_bytes()
    assert content == content[:1] * 4 * PART
    return content[0]


def generation_of_folder(path: Path) -> int:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert [str(file.relative_to(path)) for file in files] == [
        "first",
        "inner/second",
        "inner/third",
    ]
    contents = {file.read_bytes() for file in files}
    (content,) = contents
    assert content == content[:1] * 1000
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


def generation_of_tree(path: Path) -> int:
    import numpy as np

    from jfp8 import checkpoint

    saved = checkpoint.load(path)
    expected = tree_of(saved["step"])
    assert saved.keys() == expected.keys()
    for part in ("params", "moments"):
        for name, array in expected[part].items():
            np.testing.assert_array_equal(saved[part][name], array)
    return saved["step"]


# The program: forks a process, kills it, looks at what is there


def atomic_alone(source: str) -> Any:
    """`jfp8.checkpoint.atomic` without `jfp8`, whose import takes longer than all kills."""
    spec = importlib.util.spec_from_file_location("atomic", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def die_at_line(number: int, run: Callable[[], None]) -> None:
    """Do `run`, and be killed when the line of Python of that number would run, in any file."""
    lines = itertools.count()

    def trace(frame, event, arg):
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    run()


@dataclass(frozen=True)
class Kind:
    """One of the two things that can be replaced, and how to tell which one is there."""

    replace: Callable[[Path, Callable[[Any], None]], None]
    write: Callable[[int, Any], None]
    generation_of: Callable[[Path], int]

    def make(self, path: Path, generation: int) -> None:
        self.replace(path, lambda target: self.write(generation, target))


def kinds(atomic: Any) -> dict[str, Kind]:
    of_folder = lambda path: generation_of_folder(atomic.whole_directory(path))
    return {
        "file": Kind(atomic.replace_file, write_file, generation_of_file),
        "folder": Kind(atomic.replace_directory, write_folder, of_folder),
    }


def kill_at_every_line(source: str, directory: Path) -> None:
    for name, kind in kinds(atomic_alone(source)).items():
        path = directory / name / NAME
        path.parent.mkdir(parents=True)
        found: Counter[str] = Counter()
        for line in itertools.count():
            kind.make(path, 1)
            assert [entry.name for entry in path.parent.iterdir()] == [NAME]
            die_replacing = partial(die_at_line, line, partial(kind.make, path, 2))
            _, status = os.waitpid(fork(die_replacing), 0)
            if not os.WIFSIGNALED(status):
                assert os.waitstatus_to_exitcode(status) == 0
                break
            found["old" if kind.generation_of(path) == 1 else "new"] += 1
            found["leftovers"] += len(list(path.parent.iterdir())) > 1
            if line % 2:  # another one is killed there, beside the leftovers of the first
                os.waitpid(fork(die_replacing), 0)
                assert kind.generation_of(path) in (1, 2)
        assert kind.generation_of(path) == 2
        print(json.dumps({"kind": name, **found}), flush=True)


def save_again_and_again(path: Path, first: int, telling: int) -> None:
    from jfp8 import checkpoint

    for generation in itertools.count(first):
        checkpoint.save(path, tree_of(generation))
        os.write(telling, b".")


def tell_what_is_there(path: Path, telling: int) -> None:
    os.write(telling, generation_of_tree(path).to_bytes(4))


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
        assert generation in (done, done + 1)
        found["new" if generation > done else "old"] += 1
        done = generation
    os.waitpid(fork(lambda: checkpoint.save(path, tree_of(1))), 0)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    print(json.dumps({"kills": kills, "saves": done, **found}), flush=True)


def main(command: str, *arguments: str) -> None:
    if command == "lines":
        source, directory = arguments
        kill_at_every_line(source, Path(directory))
    else:
        path, kills = arguments
        kill_at_moments(Path(path), int(kills))


# The tests


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory where there is such a folder: a busy disk takes a second for an fsync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


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
def test_killed_at_every_line_of_python(directory):
    """The old one is whole until the new one is; leftovers do not pile up."""
    from jfp8.checkpoint import atomic

    file, folder = run("lines", atomic.__file__, directory)
    for found in (file, folder):
        print(found)
        assert found["old"] > 20
        assert found["new"] > 0
        assert found["leftovers"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kills"),
    [("x.msgpack", 50), ("x.safetensors", 50), ("x", 15)],
    ids=["msgpack", "safetensors", "orbax"],
)
def test_killed_at_many_moments(directory, name, kills):
    if name == "x":
        pytest.importorskip("orbax.checkpoint")
    (found,) = run("moments", directory / name, kills)
    print(found)
    assert found["kills"] == kills
    assert found["saves"] >= kills
    assert found["leftovers"] > 0  # some were killed while they wrote


# Calls that fail, as those of a full or broken disk do

CALLS = (
    *("open", "fsync", "close", "replace", "rename", "unlink", "rmdir", "mkdir"),
    *("listdir", "scandir"),
)


class Failing:
    """The functions of `os` that touch files, of which the call of one number fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.calls, self.failed = 0, None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name), number))

    def _counted(self, name: str, function: Callable[..., Any], number: int) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == number:
                self.failed = name
                raise OSError(errno.ENOSPC, "no space left on device")
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("name", ["file", "folder"])
def test_every_call_that_can_fail(directory, monkeypatch, name):
    """The error comes through, one of the two is whole, and the next replacement works."""
    from jfp8.checkpoint import atomic

    kind, path = kinds(atomic)[name], directory / NAME
    failed: Counter[str] = Counter()
    for number in itertools.count():
        kind.make(path, 1)
        assert [entry.name for entry in directory.iterdir()] == [NAME]
        with monkeypatch.context() as patch:
            failing = Failing(patch, number)
            raised = None
            try:
                kind.make(path, 2)
            except OSError as error:
                raised = error.errno
        if failing.failed is None:
            break
        assert raised == errno.ENOSPC, failing.failed
        failed[failing.failed] += 1
        assert kind.generation_of(path) in (1, 2)
    assert kind.generation_of(path) == 2
    expected = {"file": {"fsync", "replace"}, "folder": {"fsync", "rename", "mkdir"}}[name]
    assert expected <= failed.keys()
    # The file and the folder that it is in; three files and two folders, and the one they are in.
    assert failed["fsync"] == {"file": 2, "folder": 6}[name]


class Broken(Exception):
    """Not an OSError, nor anything that the code could expect."""


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(directory, parts):
    from jfp8.checkpoint import atomic

    file, folder = directory / "file", directory / "folder"
    atomic.replace_file(file, lambda target: write_file(1, target))
    atomic.replace_directory(folder, lambda target: write_folder(1, target))

    def write_some_of_a_file(target):
        target.write(b"x" * parts * PART)
        raise Broken

    def write_some_of_a_folder(target):
        target.mkdir()
        for i in range(parts):
            (target / str(i)).write_bytes(b"x")
        raise Broken

    with pytest.raises(Broken):
        atomic.replace_file(file, write_some_of_a_file)
    with pytest.raises(Broken):
        atomic.replace_directory(folder, write_some_of_a_folder)
    assert generation_of_file(file) == 1
    assert generation_of_folder(folder) == 1
    assert {entry.name for entry in directory.iterdir()} == {"file", "folder"}


def test_a_folder_that_was_half_removed_is_never_found(directory, monkeypatch):
    """Not even if somebody removes the one that has taken its place."""
    from jfp8.checkpoint import atomic

    path = directory / NAME
    atomic.replace_directory(path, lambda target: write_folder(1, target))

    def remove_some(folder, **options):
        (folder / "first").unlink()
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_some)
        with pytest.raises(Broken):
            atomic.replace_directory(path, lambda target: write_folder(2, target))
    assert generation_of_folder(path) == 2
    shutil.rmtree(path)
    assert not atomic.whole_directory(path).exists()
    atomic.replace_directory(path, lambda target: write_folder(3, target))
    assert [entry.name for entry in directory.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("there", "whole"),
    [((), "new"), (("new",), "new"), (("previous",), "previous"), (("new", "previous"), "new")],
)
def test_the_previous_folder_stands_in_only_where_there_is_no_other(directory, there, whole):
    """Killed before the new one has the name, and killed before the old one is removed."""
    from jfp8.checkpoint import atomic

    paths = {"new": directory / NAME, "previous": directory / f".{NAME}.previous"}
    for name in there:
        write_folder(1 + (name == "new"), paths[name])
    assert atomic.whole_directory(paths["new"]) == paths[whole]

    def fail(target):
        raise Broken

    with pytest.raises(Broken):
        atomic.replace_directory(paths["new"], fail)
    assert atomic.whole_directory(paths["new"]).exists() == bool(there)
    if there:
        generation = generation_of_folder(atomic.whole_directory(paths["new"]))
        assert generation == 1 + ("new" in there)


def test_only_leftovers_of_the_same_name_are_removed(directory):
    from jfp8.checkpoint import atomic

    theirs = [".a.b.0123abcd.saving", ".a.saving", ".b.0123abcd.saving", "a.0123abcd.saving", "a.b"]
    ours = [".a.0123abcd.saving", ".a.0123abcd.saving.orbax-checkpoint-tmp-7"]
    for name in (*theirs, *ours):
        (directory / name).write_bytes(b"")
    atomic.replace_file(directory / "a", lambda target: write_file(1, target))
    assert {entry.name for entry in directory.iterdir()} == {*theirs, "a"}


def test_the_disk_has_it_before_it_takes_the_name(directory, monkeypatch):
    """In this order: data, then name, then the folder with the name in it."""
    from jfp8.checkpoint import atomic

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
    atomic.replace_file(directory / NAME, lambda target: write_file(1, target))
    assert events == [f"data of {4 * PART} bytes", "name", "folder"]


if __name__ == "__main__":
    main(*sys.argv[1:])
