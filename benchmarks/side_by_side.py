"""Run several processes at a time, each on a separate core.

On one core a small model trains in three quarters of the CPU seconds that it takes on two, where
threads wait for each other. Its numbers also do not depend on the number of jobs then: XLA rounds
sums differently if several threads share them.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

Item = TypeVar("Item")

# Linux has it. Elsewhere every process uses all cores, and two of them share these.
PINS = hasattr(os, "sched_setaffinity")
CORES = sorted(os.sched_getaffinity(0)) if PINS else []


def cores_of_a_run() -> int | None:
    """Return the number of cores of a process: results depend on it."""
    return 1 if PINS else os.cpu_count()


def side_by_side(
    function: Callable[[Item], Any],
    work: Iterable[Item],
    jobs: int,
    ended: Callable[[Item, Future[Any]], None],
) -> None:
    """Call ``function(item)`` for all `work`, started in order, in `jobs` threads.

    A process that `function` starts runs on the core of its thread. ``ended(item, future)`` is
    called here, one at a time. If it raises, or is interrupted, remaining work is not started.
    """
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for job in range(jobs if PINS else 0):
        cores.put(CORES[job % len(CORES)])

    def pin() -> None:
        if PINS:  # this thread, and its children
            os.sched_setaffinity(0, {cores.get()})

    pool = ThreadPoolExecutor(jobs, initializer=pin)
    try:
        futures = {pool.submit(function, item): item for item in work}
        for future in as_completed(futures):
            ended(futures[future], future)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
