"""Scripts of `examples/` and `benchmarks/` as modules or processes, and a text to train on."""

import argparse
import importlib
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def on_path(*folders: str) -> Iterator[None]:
    """Find what scripts of these folders import, also while they run."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(ROOT / folder)
        yield


def imported(name: str, *folders: str) -> ModuleType:
    """Import a script, with the imports that ``python FOLDER/NAME.py`` would find."""
    with on_path(*folders):
        return importlib.import_module(name)


def run_script(script: Path | str, *argv: str, cwd: Path, **environment: str) -> str:
    """Run a script of this checkout in a process of its own, and return its output."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, ROOT / script, *argv],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def text_in(folder: Path) -> Path:
    """Write two modules of the standard library: more than the 80 KiB that `train_lm.py` needs."""
    path = folder / "text.py"
    path.write_bytes(b"".join(Path(m.__file__).read_bytes() for m in (argparse, typing)))
    return path
