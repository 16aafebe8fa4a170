"""Call a function in a separate process, so that a hang or crash ends nothing else.

The parent never touches the GPU itself: JAX would take most of its memory from the children.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

MARK = "@@jfp8 "  # before what a child has to say; other lines come from libraries
STARTING = 300.0  # seconds to import, to find the GPU, and to compile


@dataclass(frozen=True)
class Answer:
    """Hold the result of a function from a separate process, or the reason for its failure."""

    result: Any = None
    failure: str = ""  # empty if it did not fail
    kind: str = ""  # of the failure: "error" if the function raised, "hang" or "crash"
    seconds: float = 0.0  # from the start of the process to its end


def ask(
    function: str,
    argument: Any = None,
    *,
    running: float = 60.0,
    starting: float = STARTING,
    environment: dict[str, str] | None = None,
) -> Answer:
    """Call a function, ``"module:function"``, in another process, and wait for its result.

    JSON must hold the argument and the result. It may take `starting` seconds until it says
    `compiled`, and `running` seconds after that.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "jfp8.command_line.child", function, json.dumps(argument)],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            errors="replace",
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(environment or {})},
        )
        try:
            said = _follow(process, starting, running)
        finally:
            process.kill()
            code = None  # if the driver does not let go of it
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(30)
        seconds = round(time.monotonic() - start, 2)
        if "result" in said or "kind" in said:
            return Answer(**said, seconds=seconds)
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or ["it said nothing"])[-1]
    return Answer(
        failure=f"its process ended with exit code {code}: {last[:200]}",
        kind="crash",
        seconds=seconds,
    )


def _follow(process: subprocess.Popen[str], starting: float, running: float) -> dict[str, Any]:
    """Return what the child said last: its result, its error, or nothing if it crashed."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    limit, doing = starting, "start and compile"
    end = time.monotonic() + limit
    while True:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return {"failure": f"no answer within {limit:g} s to {doing}", "kind": "hang"}
        if line is None:
            process.wait()
            return {}
        if line.startswith(MARK):
            said = json.loads(line.removeprefix(MARK))
            if "compiled" not in said:
                return said
            limit, doing = running, "run"
            end = time.monotonic() + limit


def compiled() -> None:
    """Say that all is compiled, so that from now on silence means that a kernel hangs."""
    _say({"compiled": True})


def _say(what: dict[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)


def answer(function: str, argument: str) -> None:
    """Call the function that `ask` named, and say what came out. Ends with the parent."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, name = function.split(":")
    try:
        result = getattr(importlib.import_module(module), name)(json.loads(argument))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _say({"failure": text[:1000], "kind": "error"})
    else:
        _say({"result": result})


def _end_with(parent: int) -> None:
    """End this process, even in a kernel that hangs, when its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    # As the module of this name: what `compiled` of another copy would say is said by one.
    importlib.import_module("jfp8.command_line.child").answer(*sys.argv[1:])
