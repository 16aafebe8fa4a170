"""Copies of a checkout to plant bugs in, and pytest in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PASSED, FAILED = 0, 1  # what pytest exits with
# What git has, and what is large of what it ignores.
NOT_COPIED = (".git", ".venv*", ".*_cache", "__pycache__", "_build", "dist", "runs")


def copy_to(folder: Path, root: Path) -> Path:
    """The checkout `root`, in `folder`."""
    ignore = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(root, folder, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    return folder


def run_tests(
    root: Path, tests: Sequence[str], workers: int, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `tests` in the checkout `root`, with the jfp8 in it, until one of them fails.

    Args:
      tests: arguments of pytest: paths from `root`, and options; without paths, all tests.
      limit: seconds after which it and what it has started are killed.

    Raises:
      subprocess.TimeoutExpired: it took longer.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", f"-n{workers}"]
    command += ["-p", "no:cacheprovider", *tests]
    # Also for scripts that tests run elsewhere, and for plugins, which lie in the folder tests.
    path = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, cwd=root, env=environment, start_new_session=True, **pipes
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except BaseException:
            # All that it started: a worker that turns in circles would outlive pytest.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
