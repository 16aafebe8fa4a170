"""Each promise of docs/promises.md has tests in promises.toml; they exist, and assert something."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "promises.md"
HELD_BY = tomllib.loads((Path(__file__).parent / "promises.toml").read_text(encoding="utf-8"))


def promises() -> list[str]:
    """The items of the lists before the section on what is not promised."""
    text = PAGE.read_text(encoding="utf-8").partition("## What is not promised")[0]
    items = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    return [" ".join(item.split()) for item in items]


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


def test_the_page_has_promises():
    assert len(promises()) >= 40


def test_every_promise_is_held_by_tests():
    assert promises() == list(HELD_BY)
    for promise, named in HELD_BY.items():
        assert named, f"{promise!r} names no test as file.py::test_name"
        for file, name in (test.split("::") for test in named):
            tests = found_in(file).get(name, [])
            assert tests, f"{promise!r} is said to be held by {file}::{name}"
            assert all(map(asserts_something, tests)), f"{file}::{name} asserts nothing"


def test_a_test_that_asserts_nothing_is_seen():
    assert not asserts_something(ast.parse("def test_x():\n    run(np.max(y)).sum()"))
    assert asserts_something(ast.parse("def test_x():\n    np.testing.assert_array_equal(a, b)"))
