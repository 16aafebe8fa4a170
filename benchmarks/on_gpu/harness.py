"""Run cases that may fail, crash or hang, isolated from each other, within a time limit.

A kernel that has never run before may wait for a barrier for ever, or write out of bounds, and
then nothing works in that process. So cases run in a separate process, the worker, which reports
the start and result of each. If it falls silent, it is ended, the case is recorded as failed,
and another worker continues with the next one.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.clocks import Watch
from on_gpu.records import Record

Key = tuple[str, str, str]  # section, group, name
_MARK = "@@case "  # before a worker's messages; libraries print other lines
_LOST = 3  # exit code of a worker whose device was lost in a case that it did report


# The worker.


def work(text: str) -> None:
    """Run the cases of `text`, the plan of `supervise`, and report line by line."""
    plan = json.loads(text)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    settings = Settings(**plan["settings"])
    if plan["start"]:  # a module's function to call before anything runs, such as naming the device
        _say("hello", record=named(plan["start"])(settings))
    finished, measured = ({tuple(key) for key in plan[what]} for what in ("finished", "measured"))
    for index, (name, function) in enumerate(plan["sections"]):
        share = plan["shares"][index] / sum(plan["shares"][index:])
        end = time.time() + share * (plan["end"] - time.time())
        _say("section", name=name)
        groups = []
        try:
            found = named(function)(settings)
            groups.extend(group for group in found if re.search(settings.groups, group.name))
        except Exception as error:
            if (name, "", "") not in finished:
                _say("case", section=name, group="", name="", record=_failure(error))
        while groups:  # each gets its part of the section's time, and what others left over
            until = time.time() + (end - time.time()) / len(groups)
            group = left_of(name, groups.pop(0), finished, measured)
            _run_group(name, group, settings, until, set(plan["broken"]))
        _say("section done", name=name)


def _end_with(parent: int) -> None:
    """End this process, even in a kernel that hangs, when its supervisor was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def left_of(section: str, group: Group, finished: set[Key], measured: set[Key]) -> Group:
    """Return the remaining cases of `group`, with its baseline, to time it along with them."""

    def key(case: Case) -> Key:
        return section, group.name, case.name

    cases = [case for case in group.cases if key(case) not in finished]
    if all(key(case) in measured for case in cases):
        cases = []
    cases = [case for case in cases if key(case) not in measured or case.name == group.baseline]
    return dataclasses.replace(group, cases=cases)


def _run_group(
    section: str, group: Group, settings: Settings, end: float, broken: set[str]
) -> None:
    from on_gpu.device_time import measure, steady

    ready: dict[str, Timed] = {}
    seconds: dict[str, float] = {}
    for case in group.cases:
        where = {"section": section, "group": group.name, "name": case.name}
        if time.time() > end:
            _say("case", **where, record={"skipped": "no time was left for it"})
            continue
        if culprits := broken.intersection(case.kernels):
            _say("case", **where, record={"skipped": f"{', '.join(culprits)} hung or crashed"})
            continue
        _say("start", **where, kernels=case.kernels)
        start = time.perf_counter()
        try:
            prepared = case.prepare()
            if isinstance(prepared, Timed):
                for _ in range(settings.warmups):
                    _wait_for(prepared.run())
                ready[case.name] = prepared
            else:
                _say("case", **where, record=prepared)
        except Exception as error:
            _say("case", **where, record=_failure(error))
            _check_health()
        seconds[case.name] = time.perf_counter() - start
    if not ready:
        return
    # The baseline twice: what lies between its two figures is noise.
    again = "baseline again"
    cases = dict(ready)
    if group.baseline in ready:
        cases[again] = ready[group.baseline]
    _say("timing", section=section, group=group.name, names=list(ready))
    try:
        if group.seconds:
            times = {name: steady(timed, group.seconds) for name, timed in cases.items()}
        else:
            times = measure(cases, settings.repeats)
    except Exception as error:
        for name in ready:
            _say("case", section=section, group=group.name, name=name, record=_failure(error))
        _check_health()
        return
    noise = None
    if again in times:
        noise = abs(times[again]["ms"] / times[group.baseline]["ms"] - 1)
    for name, timed in ready.items():
        record = {
            **times[name],
            "calls": timed.calls,
            "baseline": group.baseline,
            "baseline_ms": times[group.baseline]["ms"] if group.baseline in times else None,
            "noise": noise,
            "prepare_s": round(seconds[name], 2),
            "uses": next(list(case.kernels) for case in group.cases if case.name == name),
            **timed.facts,
        }
        _say("case", section=section, group=group.name, name=name, record=record)


def _wait_for(result: Any) -> None:
    import jax

    jax.block_until_ready(result)


def _check_health() -> None:
    """End this process if the device no longer answers, so that another one starts afresh."""
    import jax
    import numpy as np

    try:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(0)))
    except Exception as error:
        print(f"The device does not answer any more: {error}", file=sys.stderr, flush=True)
        os._exit(_LOST)


def _failure(error: Exception) -> Record:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"[:2000]}


def named(name: str) -> Callable[..., Any]:
    """Return a function by its name, ``"module:function"``."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def running() -> None:
    """Say that all is compiled, so that from now on silence means that a kernel hangs."""
    _say("running")


def _say(event: str, **what: Any) -> None:
    print(_MARK + json.dumps({"event": event, **what}), flush=True)


# The supervisor.


@dataclass
class Outcome:
    """The messages of all workers; `note` receives them first."""

    note: Callable[[Record], None]
    hello: Record = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)


def supervise(
    sections: dict[str, tuple[str, float]],
    settings: Settings,
    *,
    start: str | None = None,
    minutes: float,
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    watch: Callable[[], dict[str, str] | None] | None = None,
    note: Callable[[Record], None] = lambda line: None,
    measured: Iterable[Key] = (),
) -> Outcome:
    """Run the sections in order, at most `minutes` in all.

    Args:
      sections: ``name: ("module:function", share of the time)``; what one section leaves over goes
        to those after it. The function takes `Settings` and yields `Group`.
      settings: for the sections.
      start: ``"module:function"`` that each worker calls first, ``Settings -> record``.
      minutes: after which the worker is ended, whatever it does.
      environment: variables to set in it.
      log: file for other output of the worker; None to discard it.
      watch: called repeatedly while a group is being timed, on a separate thread; the
        group's records get a summary of its results, as ``clocks``.
      note: told at once of each line for the file of records.
      measured: section, group and name of cases that an earlier call did.

    Returns:
      All records, each with its section, group and name.
    """
    outcome = Outcome(note)
    end = time.time() + 60 * minutes
    remaining = list(sections)
    broken: set[str] = set()
    with open(log or os.devnull, "a") as log_file:
        while remaining:
            plan = {
                "settings": dataclasses.asdict(settings),
                "start": start,
                "sections": [(name, sections[name][0]) for name in remaining],
                "shares": [sections[name][1] for name in remaining],
                "finished": [(r["section"], r["group"], r["name"]) for r in outcome.records],
                "measured": list(measured),
                "broken": sorted(broken),
                "end": end,
            }
            worker = _Worker(plan, settings, environment, log_file)
            worker.follow(outcome, remaining, broken, watch)
    return outcome


class _Worker:
    """The process, and its current case."""

    def __init__(
        self, plan: Record, settings: Settings, environment: dict[str, str] | None, log: Any
    ) -> None:
        here = Path(__file__).parents[1]
        paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH")]
        self.settings, self.end, self.log = settings, plan["end"], log
        self.silence = settings.compiling
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys, on_gpu.harness; on_gpu.harness.work(sys.argv[1])"]
            + [json.dumps(plan)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                **(environment or {}),
            },
        )

    def follow(
        self,
        outcome: Outcome,
        remaining: list[str],
        broken: set[str],
        watch: Callable[[], dict[str, str] | None] | None,
    ) -> None:
        """Take down what it finishes, until it ends or is ended, and then who is to blame."""
        doing: list[Record] = []
        kernels: list[str] = []
        watched: Watch | None = None
        section, began = remaining[0], time.time()
        stopped = None
        try:
            for event in self._events():
                what = event.pop("event")
                if what in ("silent", "no time"):
                    stopped = what
                    break
                self.silence = self.settings.compiling
                if what == "hello":
                    outcome.hello = event["record"]
                    outcome.note({"line": "worker", **outcome.hello})
                elif what == "section":
                    section, began = event["name"], time.time()
                elif what == "section done":
                    _add_seconds(outcome, section, time.time() - began)
                    remaining.remove(section)
                elif what == "start":
                    kernels = event.pop("kernels")
                    doing = [event]
                elif what == "timing":
                    kernels, names = [], event.pop("names")
                    doing = [{**event, "name": name} for name in names]
                    watched = Watch(watch) if watch else None
                elif what == "case":
                    doing = [d for d in doing if d["name"] != event["name"]]
                    if watched and "ms" in event["record"]:
                        event["record"]["clocks"] = watched.stop()
                    _record(outcome, **event)
                if what in ("running", "timing"):
                    self.silence = self.settings.running
        finally:
            if watched:
                watched.stop()
            self.process.kill()
            code = self.process.wait()
        if not remaining:
            return
        _add_seconds(outcome, section, time.time() - began)
        if stopped == "no time":
            doing += [{"section": name, "group": "", "name": ""} for name in remaining]
            remaining.clear()
            result = {"skipped": "no time was left for it"}
        elif stopped == "silent":
            result = {"error": f"no answer within {self.silence:.0f} s: does it hang?"}
        else:
            result = {"error": f"the process ended (exit code {code})"}
        if stopped != "no time":
            broken.update(kernels)
            if not doing and code != _LOST:  # not within a case
                doing = [{"section": remaining.pop(0), "group": "", "name": ""}]
        for d in doing:
            _record(outcome, **d, record=result)

    def _events(self) -> Iterator[Record]:
        """Yield the worker's messages, and ``silent`` or ``no time`` in these cases."""
        lines: queue.Queue[str | None] = queue.Queue()
        stdout = self.process.stdout
        assert stdout is not None

        def read() -> None:
            with stdout:
                for line in stdout:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            left = self.end - time.time()
            try:
                line = lines.get(timeout=max(0.0, min(self.silence, left)))
            except queue.Empty:
                yield {"event": "no time" if left < self.silence else "silent"}
                return
            if line is None:
                self.process.wait()
                return
            if line.startswith(_MARK):
                yield json.loads(line.removeprefix(_MARK))
            else:
                self.log.write(line)


def _record(outcome: Outcome, section: str, group: str, name: str, record: Record) -> None:
    record = {"section": section, "group": group, "name": name, **record}
    outcome.records.append(record)
    outcome.note({"line": "record", **record})
    if "ms" in record:
        said = f"{record['ms']:.4f} ms"
    else:
        said = record.get("error") or record.get("skipped") or "done"
    print(f"{section}: {group}: {name}: {said.splitlines()[0][:120]}", flush=True)


def _add_seconds(outcome: Outcome, name: str, seconds: float) -> None:
    outcome.note({"line": "section", "name": name, "seconds": round(seconds, 1)})
