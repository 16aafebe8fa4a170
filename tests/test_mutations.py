"""`planted_bugs.py` and `mutations.py`: the bugs fit the source, and what is said of each is true.

To see that the tests notice them takes minutes: ``python tests/mutations.py``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from pathlib import Path

import pytest

import jfp8

TESTS = Path(__file__).resolve().parent
# Of the wheel, if the tests are outside of the checkout.
SOURCES = Path(jfp8.__file__).parents[1]


@pytest.fixture(scope="module")
def mutations():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS)
        yield importlib.import_module("mutations")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A package of one line and a test that looks at it, laid out like this checkout."""
    (tmp_path / "jfp8").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "jfp8/__init__.py").write_text("HALF = 1 / 2\nTHIRD = 1 / 3\n")
    (tmp_path / "tests/test_half.py").write_text(
        "import jfp8\ndef test_half():\n    assert jfp8.HALF == 0.5\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["-n2"]\n')
    return tmp_path


@pytest.fixture
def bug(mutations):
    def make(old, new, test="test_half"):
        test = f"test_half.py::{test}"
        return mutations.Bug("a_bug", "what", "jfp8/__init__.py", old, new, test)

    return make


@functools.cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def program_of(path: Path) -> str:
    return ast.dump(syntax_of(path))


def marks(node: ast.AST) -> str:
    return " ".join(ast.unparse(d) for d in getattr(node, "decorator_list", []))


def test_the_bugs_are_many_and_everywhere(mutations):
    names = [bug.name for bug in mutations.BUGS]
    assert len(set(names)) == len(names) >= 25
    assert len({(bug.file, bug.old, bug.new) for bug in mutations.BUGS}) == len(names)
    folders = {Path(bug.file).parent.as_posix() for bug in mutations.BUGS}
    rooms = ("scaling", "matmul", "products", "layers/linen", "layers/nnx", "training", "optim")
    assert folders >= {f"jfp8/{room}" for room in rooms}


def test_each_changes_one_place_and_leaves_python(mutations):
    for bug in mutations.BUGS:
        source = (SOURCES / bug.file).read_text()
        planted = bug.planted(source)
        # Another program, not another spelling of it, nor a comment or a docstring.
        assert ast.dump(ast.parse(planted)) != program_of(SOURCES / bug.file), bug.name


def test_each_names_a_test_of_the_default_suite(mutations):
    for bug in mutations.BUGS:
        file, *path = bug.test.partition("[")[0].split("::")
        node: ast.AST = syntax_of(TESTS / file)
        assert "\npytestmark" not in (TESTS / file).read_text(), f"{file} has marks as a whole"
        for name in path:
            found = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == name]
            assert len(found) == 1, f"{bug.name}: there is no {name} in {file}"
            (node,) = found
            assert not {"slow", "gpu", "skip"} & set(re.findall(r"\w+", marks(node))), bug.name
            # The cases of every day are counted from the first that is collected.
            assert "representative" not in marks(node) or "[" not in bug.test, bug.name
        assert path[-1].startswith("test_"), bug.name


@pytest.mark.parametrize(("old", "times"), [("1 / 4", 0), ("1 /", 2)])
def test_a_place_that_is_not_there_once_is_told(bug, checkout, old, times):
    with pytest.raises(ValueError, match=rf"a_bug: '{old}' occurs {times} times in jfp8/__init__"):
        bug(old, "").planted((checkout / "jfp8/__init__.py").read_text())


@pytest.mark.parametrize(
    ("old", "new", "test", "verdict", "by"),
    [
        ("1 / 2", "1 * 2", "test_half", "caught", "tests/test_half.py::test_half"),
        ("1 / 3", "1 * 3", "test_half", "SURVIVED", "1 passed"),
        ("1 / 2", "1 / 2)", "test_half", "DID NOT RUN", "1 error"),
        ("1 / 2", "1 * 2", "test_third", "DID NOT RUN", "no tests ran"),
    ],
)
def test_only_a_test_that_fails_has_caught_a_bug(
    mutations, bug, checkout, old, new, test, verdict, by
):
    outcome = mutations.outcome_of(bug(old, new, test), checkout)
    assert outcome.verdict == verdict
    assert by in outcome.by
    assert (checkout / "jfp8/__init__.py").read_text() == "HALF = 1 / 2\nTHIRD = 1 / 3\n"


@pytest.mark.parametrize(
    ("news", "code", "caught"), [({"1 / 2": "2"}, 0, 1), ({"1 / 2": "2", "1 / 3": "3"}, 1, 1)]
)
def test_the_summary(mutations, bug, checkout, monkeypatch, capsys, news, code, caught):
    bugs = [bug(old, new) for old, new in news.items()]
    monkeypatch.setattr(mutations, "BUGS", bugs)
    monkeypatch.setattr(mutations, "ROOT", checkout)
    assert mutations.main(["--jobs", "1"]) == code
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["bugs"], summary["caught"]) == (len(bugs), caught)
    assert summary["not_caught"] == ["a_bug"] * (len(bugs) - caught)


def test_tests_have_to_pass_without_a_bug(mutations, bug, checkout, monkeypatch, capsys):
    (checkout / "jfp8/__init__.py").write_text("HALF = 1 // 2\n")
    monkeypatch.setattr(mutations, "BUGS", [bug("1 // 2", "1 / 2")])
    monkeypatch.setattr(mutations, "ROOT", checkout)
    assert mutations.main([]) == 2
    assert "The tests fail without a bug." in capsys.readouterr().out


def test_a_bug_by_name(mutations, capsys):
    name = mutations.BUGS[0].name
    assert mutations.main(["--list", "--only", name]) == 0
    assert f": {name}: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mutations.main(["--list", "--only", "no_such_bug"])
    assert "there is no bug called no_such_bug" in capsys.readouterr().err
