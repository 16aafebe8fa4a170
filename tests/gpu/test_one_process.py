"""Tests of a GPU share one process, though tests run in two: JAX takes most of its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "workers"), [(["-m", "gpu"], False), ([], True)], ids=str)
def test_one_process(options, workers):
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_on_gpu.py", "-k", "casts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "6 skipped" in done.stdout
    assert ("2 workers" in done.stdout) is workers
