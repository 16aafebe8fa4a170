"""The table of docs/trainers/index.md is that of the records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "clients")
    import table

    monkeypatch.delitem(sys.modules, "table")
    records = json.loads(table.RESULTS.read_text())
    page = (ROOT / "docs" / "trainers" / "index.md").read_text()
    assert "\n".join(table.table(records)) in page
    for name, record in records.items():
        for recipe in table.RECIPES:
            assert record[recipe]["fp8"] == record["needed"], (name, recipe)
