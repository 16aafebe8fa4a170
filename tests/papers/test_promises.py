"""docs/promises.md: every promise names tests that hold it, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "promises.md"
NAME = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, ...]]:
    """The cells of every row of every table, without headings."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return [row for row in cells if row[0] != "promise" and set(row[0]) != {"-"}]


@cache
def names_of(file: str) -> frozenset[str]:
    """Names of the tests in tests/`file`, those in classes too."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_the_page_has_promises():
    assert len(rows()) >= 40
    assert all(len(row) == 3 for row in rows()), "promise | how exact | held by"


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"\W+", "_", row[0])[:60])
def test_every_promise_is_held_by_a_test(row):
    promise, exact, held_by = row
    named = NAME.findall(held_by)
    assert promise
    assert exact
    assert named, f"{promise!r} names no test as `test_file.py::test_name`"
    assert not NAME.sub("", held_by).strip(" ,"), f"{promise!r}: nothing but tests in the last cell"
    for file, name in named:
        assert name in names_of(file), f"{promise!r} is said to be held by {file}::{name}"
