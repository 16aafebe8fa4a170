"""Call a function in a separate process, so that a hang or crash ends nothing else.

The parent never touches the GPU itself: JAX would take most of its memory from the children.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from typing import Any

MARK = "@@jfp8 "  # begins the line with the answer; libraries print other lines


def ask(
    function: str,
    argument: Any = None,
    *,
    limit: float = 300.0,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Call a function, ``"module:function"``, in another process, for at most `limit` seconds.

    JSON must hold the argument and the result. Returns the ``"result"``; the ``"failure"``, empty
    without one; its ``"kind"``: an "error" of the function, "hang" or "crash"; and ``"seconds"``.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", "jfp8.command_line.child", function, json.dumps(argument)]
    inherited = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdout=output, stderr=complaints, env={**inherited, **(environment or {})}
        )
        said: dict[str, Any] = {"failure": f"no answer within {limit:g} s", "kind": "hang"}
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
                said = _answer(_text(output), _text(complaints), code)
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)  # and no longer, if the driver does not release it
    seconds = round(time.monotonic() - start, 2)
    return {"result": None, "failure": "", "kind": "", **said, "seconds": seconds}


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answer(output: str, complaints: str, code: int) -> dict[str, Any]:
    """Return the answer in the output of a process, or the last line of its complaints."""
    marked = [line for line in output.splitlines() if line.startswith(MARK)]
    if marked:
        return json.loads(marked[-1].removeprefix(MARK))
    last = (complaints.strip().splitlines() or ["it said nothing"])[-1]
    return {"failure": f"its process ended with exit code {code}: {last[:200]}", "kind": "crash"}


def answer(function: str, argument: str) -> None:
    """Call the function that `ask` named, and print its result or its error."""
    try:
        said = {"result": pkgutil.resolve_name(function)(json.loads(argument))}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        said = {"failure": text[:1000], "kind": "error"}
    print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    answer(*sys.argv[1:])
