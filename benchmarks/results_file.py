"""A file of results that many commands add to: safe to interrupt, and only like runs are mixed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import flax
import jax
import optax
from side_by_side import cores_of_a_run

import jfp8

ROOT = Path(__file__).resolve().parents[1]


def read(path: Path, names: set[str]) -> dict[str, Any]:
    """Return the file's entries with the names in `names`; {} if there is no file."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text())
    if not set(results) <= names:
        raise SystemExit(
            f"{path} does not hold runs of this script: remove it, or name another "
            "file with --results"
        )
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    """Write next to `path`, then rename: a crash leaves the old file or the new one.

    Lists of numbers stand on one line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
    one_line = lambda numbers: " ".join(numbers[0].split())
    text = re.sub(r"\[[-+.\de,\snul]*\]", one_line, text)
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def conditions(**more: Any) -> dict[str, Any]:
    """Return the conditions that compared runs must share."""
    versions = {m.__name__: m.__version__ for m in (jax, flax, optax, jfp8)}
    cores = cores_of_a_run()
    return {"python": platform.python_version(), **versions, "cores_of_a_run": cores, **more}


def check_conditions(
    path: Path, name: str, recorded: dict[str, Any], given: dict[str, Any]
) -> None:
    """Refuse to mix runs with different settings. `recorded` is empty if there are none."""
    differences = [
        f"{key} was {recorded.get(key, 'not recorded')} and is {value}"
        for key, value in given.items()
        if recorded and recorded.get(key) != value
    ]
    if differences:
        raise SystemExit(
            f"{path}: its runs of {name} were made otherwise: {'; '.join(differences)}. Runs made "
            "differently are not compared: put things back, repeat all of them with --fresh, or "
            "name another file with --results"
        )


def commit() -> str | None:
    """Return the library's commit, with a plus if modified; None without Git."""
    git = ["git", "-C", str(ROOT)]
    try:
        command = [*git, "rev-parse", "--short", "HEAD"]
        name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        command = [*git, "diff", "--quiet", "HEAD", "--", "jfp8", "examples"]
        return name + ("+" if subprocess.run(command, check=False).returncode else "")
    except (OSError, subprocess.CalledProcessError):
        return None
