"""Each promise of docs/promises.md has tests in promises.toml; they exist, and assert something."""

import ast
import operator
import re
import tomllib
from functools import cache
from pathlib import Path

import jfp8

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).parent / "promises.toml"
SECTIONS = tomllib.loads(FILE.read_text(encoding="utf-8"))
HELD_BY = {promise: tests for section in SECTIONS.values() for promise, tests in section.items()}


@cache
def found_in(file: str) -> dict[str, list[ast.FunctionDef]]:
    """The tests in tests/`file` by name, those in classes too."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.setdefault(node.name, []).append(node)
    return found


def asserts_something(test: ast.AST) -> bool:
    """Whether it has an ``assert``, or calls a function that says that it asserts or checks."""
    calls = [node.func for node in ast.walk(test) if isinstance(node, ast.Call)]
    called = [getattr(function, "attr", getattr(function, "id", "")) for function in calls]
    named = [name for name in called if re.match(r"(assert|check|fail|raises)", name)]
    return bool(named) or any(isinstance(node, ast.Assert) for node in ast.walk(test))


def test_every_promise_is_held_by_tests():
    assert len(HELD_BY) >= 40
    for promise, named in HELD_BY.items():
        assert named, f"{promise!r} names no test as file.py::test_name"
        for file, name in (test.split("::") for test in named):
            tests = found_in(file).get(name, [])
            assert tests, f"{promise!r} is said to be held by {file}::{name}"
            assert all(map(asserts_something, tests)), f"{file}::{name} asserts nothing"


def test_names_in_promises_exist():
    for path in re.findall(r"`jfp8\.(\w+(?:\.\w+)*)`", " ".join(HELD_BY)):
        assert operator.attrgetter(path)(jfp8), path


def test_a_test_that_asserts_nothing_is_seen():
    assert not asserts_something(ast.parse("def test_x():\n    run(np.max(y)).sum()"))
    assert asserts_something(ast.parse("def test_x():\n    np.testing.assert_array_equal(a, b)"))
