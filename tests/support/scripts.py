"""Scripts of `examples/` and `benchmarks/` as modules, and a text for them to train on."""

from __future__ import annotations

import argparse
import importlib
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


def text_in(folder: Path) -> Path:
    """Write two modules of the standard library: more than the 80 KiB that `train_lm.py` needs."""
    path = folder / "text.py"
    path.write_bytes(b"".join(Path(m.__file__).read_bytes() for m in (argparse, typing)))
    return path
