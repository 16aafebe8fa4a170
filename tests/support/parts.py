"""Divide tests among runs of about equal length, by the measured seconds of each file."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

MEASURED = Path(__file__).parents[2] / ".ci" / "seconds.json"
UNKNOWN = 5.0  # seconds of a file that is not in the table


def files_of_part(
    files: Collection[str], seconds: Mapping[str, float], part: str
) -> frozenset[str]:
    """Return the `files` in one part: the longest file first, to the shortest part."""
    index, count = map(int, part.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"--part {part} must be I/N with I from 1 to N, such as 2/4.")
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for file in sorted(files, key=lambda file: (-seconds.get(file, UNKNOWN), file)):
        shortest = loads.index(min(loads))
        parts[shortest].append(file)
        loads[shortest] += seconds.get(file, UNKNOWN)
    return frozenset(parts[index - 1])


def measured(path: Path = MEASURED) -> dict[str, float]:
    """Return the seconds of files in the table."""
    return json.loads(path.read_text(encoding="utf-8"))


def update(found: Mapping[str, float], root: Path, path: Path = MEASURED) -> None:
    """Write the seconds of the files that ran into the table, and drop files that are gone."""
    seconds = {**measured(path), **{file: round(x, 1) for file, x in found.items()}}
    kept = {file: seconds[file] for file in sorted(seconds) if (root / file).is_file()}
    path.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
