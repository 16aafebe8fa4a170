from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest

from gpu.ptx.schedules import Ahead, Drawn, Turns
from support.gpu_programs import why_not

LEAST = (0, 11, 2)  # JAX


@pytest.fixture(scope="session", autouse=True)
def compilers():
    if reason := why_not(LEAST):
        pytest.skip(reason)


@pytest.fixture
def executed(request, record_property):
    """Run a function from its PTX under all schedules, and check each result."""

    def run(check: Callable[..., None], f: Callable[..., Any], *args: Any) -> None:
        from gpu.ptx.emulate import Emulated

        emulated = Emulated(f, *args)
        seed = zlib.crc32(request.node.name.encode()) % 1000
        for schedule in (Turns(True), Turns(False), Drawn(seed), Ahead(seed), Ahead(seed + 1)):
            try:
                check(emulated(schedule))
            except Exception as error:
                error.add_note(f"under {schedule}")
                raise
        kernels = {kernel.name: len(kernel.qgmma) for kernel in emulated.kernels.values()}
        record_property("kernels", ", ".join(sorted(kernels)))
        record_property("steps", emulated.steps)

    return run
