import itertools
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from gpu_programs import why_not
from ptx.schedules import Ahead, Drawn, Turns

LEAST = (0, 11, 2)  # JAX


@pytest.fixture(scope="session", autouse=True)
def compilers():
    if reason := why_not(LEAST):
        pytest.skip(reason)


@pytest.fixture
def executed(request, record_property):
    """Run a function from its PTX under schedules, and check each result.

    Products end for a warpgroup together, and then, under others, for each warp by itself.
    """

    def run(check: Callable[..., None], f: Callable[..., Any], *args: Any) -> None:
        from ptx.emulate import Emulated

        emulated = Emulated(f, *args)
        seeds = itertools.count(zlib.crc32(request.node.name.encode()) % 1000)
        schedules = [Turns(True), Turns(False), *(kind(next(seeds)) for kind in (Drawn, Ahead))]
        for collective in (True, False):
            for schedule in schedules:
                try:
                    check(emulated(schedule, collective=collective))
                except Exception as error:
                    error.add_note(f"under {schedule}, collective={collective}")
                    raise
            if not any(kernel.qgmma for kernel in emulated.kernels.values()):
                break
            schedules = [Turns(False), *(kind(next(seeds)) for kind in (Drawn, Ahead))]
        names = sorted(kernel.name for kernel in emulated.kernels.values())
        record_property("kernels", ", ".join(names))
        record_property("steps", emulated.steps)

    return run
