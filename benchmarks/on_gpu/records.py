"""The file of records: a line of JSON for each, written as it is made, and read back as a result.

A process that is killed leaves every record that it made. A file that exists is continued, so that
several calls fill one file; of a case that is there twice, the last with a result counts. Lines are

    {"line": "run", ...}      a call: when, with which settings
    {"line": "worker", ...}   device and versions, by each process that works
    {"line": "section", ...}  the seconds that a section took
    {"line": "record", ...}   a case: section, group, name, and its times, its facts or its error
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(path: Path, line: Record) -> None:
    """Add `line` by a single write, which is done when this returns."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def replace(path: Path, text: str) -> None:
    """Write `text` so that whoever reads `path`, at any time, finds the old text or the new."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def read(path: Path) -> list[Record]:
    """All lines of `path`, without one that a full disk or a power failure cut off."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def measured(path: Path) -> list[tuple[str, str, str]]:
    """Section, group and name of all that is in `path`, less what failed or had no time."""
    if not path.exists():
        return []
    return [(r["section"], r["group"], r["name"]) for r in load(path)["records"] if not _failed(r)]


def _of_each_case(lines: list[Record]) -> dict[tuple[str, str, str], Record]:
    records: dict[tuple[str, str, str], Record] = {}
    for line in lines:
        if line["line"] == "run":  # tries again what failed or was skipped as a whole
            again = line.get("settings", {}).get("sections", ())
            records = {key: r for key, r in records.items() if key[1] or key[0] not in again}
        if line["line"] == "record":
            key = line["section"], line["group"], line["name"]
            if key not in records or not _failed(line) or _failed(records[key]):
                records[key] = {k: v for k, v in line.items() if k != "line"}
    return records


def _failed(record: Record) -> bool:
    return "error" in record or "skipped" in record


def load(path: Path) -> Record:
    """The result: a dictionary of all that `path` says, with a list of records and no rates yet."""
    lines = read(path)

    def of(kind: str) -> list[Record]:
        return [{k: v for k, v in l.items() if k != "line"} for l in lines if l["line"] == kind]

    runs, workers = of("run"), of("worker")
    if not runs:
        raise ValueError(f"{path} has no line of a run: it is not of these benchmarks")
    worker = workers[-1] if workers else {}
    others = {w["device"] for w in workers} - {worker.get("device")}
    if others:
        raise ValueError(f"{path} mixes devices: {worker['device']} and {', '.join(others)}")
    records = _of_each_case(lines)
    seconds = {section: 0.0 for section, _, _ in records}
    for section in of("section"):
        seconds[section["name"]] = seconds.get(section["name"], 0.0) + section["seconds"]
    clocks = [r["clocks"] for r in records.values() if r.get("clocks")]
    return {
        **runs[-1],
        "device": {
            "kind": worker.get("device"),
            "driver": clocks[-1]["driver_version"] if clocks else None,
            **{
                key: worker.get(key)
                for key in ("platform", "compute_capability", "multiprocessors", "memory_bytes")
            },
        },
        "versions": worker.get("versions", {}),
        "sections": {name: {"seconds": round(s, 1)} for name, s in seconds.items()},
        "records": list(records.values()),
    }
