"""The table of the gaps that docs/benchmarks.md sums up, from the records of the clients.

python benchmarks/clients/table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence import equivalence

RESULTS = Path(__file__).parents[1] / "results" / "clients.json"
RECIPES = ("delayed", "current", "mxfp8")
SHOWN = ("delayed", "mxfp8")
HEAD = ("client", "projections in FP8", *SHOWN)


def gap(record: dict[str, Any], recipe: str) -> str:
    """Return the gap of the loss to f32, in %, with the 90 % interval of the mean."""
    f32, fp8 = (np.array(record[name]["losses"]) for name in ("f32", recipe))
    found = equivalence(100 * (fp8 / f32 - 1), margin=1.0)
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def projections(record: dict[str, Any]) -> str:
    """``"10 of 10"``; by recipe, if they differ."""
    counts = {record[recipe]["fp8"] for recipe in RECIPES}
    return f"{'/'.join(map(str, sorted(counts)))} of {record['needed']}"


def table(records: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for name, record in sorted(records.items()):
        lines.append((name, projections(record), *(gap(record, recipe) for recipe in SHOWN)))
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print("\n".join(table(json.loads(RESULTS.read_text()))))
