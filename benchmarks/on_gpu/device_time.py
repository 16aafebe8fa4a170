"""Measure the device time of a program: from CUPTI's records, else from chains of two lengths.

By CUPTI, through JAX's profiler: a run takes from the start of its first kernel to the end of its
last one, whatever Python and the launch take. Runs do not overlap, so a kernel belongs to the run
within whose time on the host it starts. Without CUPTI each case has a second, shorter chain, and a
call takes the difference of their times by the host's clock, divided by the difference of their
calls: what a launch takes is in both, and drops out.

`measure` runs all cases in turn, so that a change of clock hits them alike. `steady` runs one.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from on_gpu.cases import Timed
from on_gpu.records import Record

_RUN = "timed run "  # and its number: the annotation of a run on the host


def measure(cases: Mapping[str, Timed], repeats: int) -> dict[str, Record]:
    """Return per case ``ms`` of a call (median), ``ms_p10``, ``ms_p90``, and the used ``clock``.

    With CUPTI also ``busy_ms``: without the gaps between kernels, and ``host_ms``: by the host's
    clock without a profiler, and so with CUDA graphs, which XLA does not use under a profiler.
    """
    order = [name for _ in range(repeats) for name in cases]
    if not has_cupti():
        return _by_host(cases, order)
    with tempfile.TemporaryDirectory() as folder:
        host = [(name, _host_ms(cases[name].run)) for name in order[: 5 * len(cases)]]
        with _traced(folder):
            for number, name in enumerate(order):
                with jax.profiler.TraceAnnotation(f"{_RUN}{number}"):
                    jax.block_until_ready(cases[name].run())
        runs = kernels_of_runs(_profile(folder))
    spans = {number: span(kernels) for number, kernels in runs.items()}
    found = {}
    for name, case in cases.items():
        by_host = spread([ms / case.calls for at, ms in host if at == name])
        own = [spans[i] for i, at in enumerate(order) if at == name and i in spans]
        if not own:  # CUPTI lost them
            found[name] = {**by_host, "clock": "host"}
            continue
        span, busy = (1e-6 * np.asarray(column) / case.calls for column in zip(*own))
        found[name] = {
            **spread(span),
            "busy_ms": float(np.median(busy)),
            "host_ms": by_host["ms"],
            "clock": "CUPTI",
        }
    return found


def steady(case: Timed, seconds: float) -> Record:
    """Run a case without a pause for some seconds, and return the times of the second half.

    With CUPTI also ``busy_ms``, and ``kernels_us``: microseconds of a call by name of the kernel,
    from runs right afterwards.
    """
    marks, pending = [time.perf_counter()], collections.deque()
    while len(marks) < 3 or marks[-1] < marks[0] + seconds:
        pending.append(case.run())
        if len(pending) > 2:  # so that the device never waits for the host
            jax.block_until_ready(pending.popleft())
            marks.append(time.perf_counter())
    jax.block_until_ready(list(pending))
    found = {**spread(1e3 * np.diff(marks)[len(marks) // 2 :] / case.calls), "clock": "host"}
    if not has_cupti():
        return found
    with tempfile.TemporaryDirectory() as folder:
        with _traced(folder):
            for number in range(5):
                with jax.profiler.TraceAnnotation(f"{_RUN}{number}"):
                    jax.block_until_ready(case.run())
        runs = list(kernels_of_runs(_profile(folder)).values())
    if not runs:  # CUPTI lost them
        return found
    calls, us = case.calls * len(runs), collections.Counter[str]()
    for kernel in itertools.chain(*runs):
        us[kernel.name] += 1e-3 * (kernel.end - kernel.start) / calls
    busy = float(np.median([span(kernels)[1] for kernels in runs]))
    return {**found, "busy_ms": 1e-6 * busy / case.calls, "kernels_us": dict(us.most_common())}


def _by_host(cases: Mapping[str, Timed], order: Iterable[str]) -> dict[str, Record]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name in order:
        case = cases[name]
        ms = _host_ms(case.run)
        if case.shorter is None:
            times[name].append(ms / case.calls)
        else:
            less = _host_ms(case.shorter)
            times[name].append((ms - less) / (case.calls - case.shorter_calls))
    return {
        name: {**spread(ms), "clock": "host" if cases[name].shorter is None else "slope"}
        for name, ms in times.items()
    }


def _host_ms(run: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - start)


def spread(ms: Any) -> Record:
    """Return the median, and 10th and 90th percentiles."""
    low, middle, high = np.percentile(np.asarray(ms, np.float64), (10, 50, 90))
    return {"ms": float(middle), "ms_p10": float(low), "ms_p90": float(high)}


class Kernel(NamedTuple):
    """A kernel that ran, from `start` to `end` in ns."""

    start: float
    end: float
    name: str


def kernels_of_runs(profile: ProfileData) -> dict[int, list[Kernel]]:
    """Return the kernels of each numbered run that has any, in order."""
    runs: dict[int, tuple[float, float]] = {}
    kernels: list[Kernel] = []
    for plane in profile.planes:
        on_device = plane.name.startswith("/device:GPU")
        lines = list(plane.lines)
        if on_device:  # its streams; other lines repeat them, by operation
            lines = [line for line in lines if line.name.startswith("Stream")] or lines
        for line in lines:
            for event in line.events:
                if on_device:
                    kernels.append(Kernel(event.start_ns, event.end_ns, event.name))
                elif event.name.startswith(_RUN):
                    number = int(event.name.removeprefix(_RUN).partition("#")[0])
                    runs[number] = event.start_ns, event.end_ns
    kernels.sort()
    starts = [kernel.start for kernel in kernels]
    found = {
        number: kernels[bisect.bisect_left(starts, begin) : bisect.bisect_right(starts, end)]
        for number, (begin, end) in runs.items()
    }
    return {number: own for number, own in found.items() if own}


def span(kernels: list[Kernel]) -> tuple[float, float]:
    """Return ns from the start of the first kernel to the end of the last, and without gaps."""
    busy, until = 0.0, kernels[0].start
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return until - kernels[0].start, busy


@functools.cache
def has_cupti() -> bool:
    """Return True if JAX's profiler records kernels of this process's GPU."""
    if jax.default_backend() != "gpu":
        return False
    try:
        add = jax.jit(lambda x: x + 1)
        jax.block_until_ready(add(0.0))
        with tempfile.TemporaryDirectory() as folder:
            with _traced(folder), jax.profiler.TraceAnnotation(f"{_RUN}0"):
                jax.block_until_ready(add(0.0))
            return bool(kernels_of_runs(_profile(folder)))
    except Exception as error:  # CUPTI is missing, or this user may not use it
        print(f"No device times by CUPTI: {error}", flush=True)
        return False


def _traced(folder: str) -> Any:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # annotations
    return jax.profiler.trace(folder, profiler_options=options)


def _profile(folder: str) -> ProfileData:
    (path,) = Path(folder).rglob("*.xplane.pb")
    return ProfileData.from_file(str(path))
