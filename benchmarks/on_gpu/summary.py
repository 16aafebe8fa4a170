"""Keep the times of a file of records, without programs and memory, as a record in the repository.

The summary lists runs by the name of their file, so that running the command again replaces one of
them and keeps the others, and all that was added by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from on_gpu.records import Record, replace

_DIGITS = 6
_TIMES = {"ms": "ms", "p10": "ms_p10", "p90": "ms_p90", "busy_ms": "busy_ms"}
_RATES = (
    "baseline_ms",
    "ratio",
    "tflops",
    "gbs",
    "percent_of_best",
    "percent_of_floor",
    "first_loss",
)
_CLOCKS = ("sm_mhz", "sm_mhz_least", "watts", "watts_median", "throttled")
_MORE = ("kernels_us", "memory", "relative_errors")


def summarize(result: Record) -> Record:
    """Return the conditions, ceilings, times and gaps of `result`, which has its rates."""
    timed = [r for r in result["records"] if "ms" in r]
    missing: dict[str, list[str]] = {}
    for r in result["records"]:
        if "ms" not in r and r["name"]:
            missing.setdefault(f"{r['section']}: {r['group']}", []).append(r["name"])
    return {
        **{key: result[key] for key in ("date", "device", "versions", "settings")},
        "ceilings": _rounded(result["ceilings"]),
        "records": [_line(r) for r in timed],
        "not_measured": missing,
    }


def _line(record: Record) -> Record:
    """Return the case, its milliseconds and rates, and the clocks of its group, on one level."""
    clocks = record.get("clocks") or {}
    return {
        **{key: record[key] for key in ("section", "group", "name")},
        **_rounded({short: record.get(key) for short, key in _TIMES.items()}),
        **_rounded({key: record[key] for key in _RATES if record.get(key) is not None}),
        **{key: clocks[key] for key in _CLOCKS if key in clocks},
        **{key: _rounded(record[key]) for key in _MORE if record.get(key)},
    }


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {k: v if v is None else float(f"{v:.{_DIGITS}g}") for k, v in numbers.items()}


def write(path: Path, name: str, result: Record) -> None:
    """Put the summary of `result` into the file `path` as its run `name`."""
    record = json.loads(path.read_text()) if path.exists() else {}
    record.setdefault("runs", {})[name] = summarize(result)
    replace(path, text(record) + "\n")


def text(value: Any, indent: str = "") -> str:
    """Return JSON with each innermost dictionary, and each list of plain values, on one line."""
    if not _is_split(value):
        return json.dumps(value, ensure_ascii=False)
    more = indent + " "
    if isinstance(value, list):
        begin, end, lines = "[", "]", [text(v, more) for v in value]
    else:
        begin, end = "{", "}"
        lines = [f"{json.dumps(key)}: {text(v, more)}" for key, v in value.items()]
    return f"{begin}\n{more}" + f",\n{more}".join(lines) + f"\n{indent}{end}"


def _is_split(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(v, dict | list) for v in value)
    values = value.values() if isinstance(value, dict) else ()
    return any(isinstance(v, dict) or _is_split(v) for v in values)
