"""`mutations.py`: planted bugs fit the source, random ones are bugs, and what is said is true.

To see that the tests notice them takes minutes: ``python tests/mutations.py``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# Drawn at random

# One place or more for every kind of change, and what has none: "kept" is in all of that.
EVERY_KIND = '''
"""kept"""
from __future__ import annotations
import typing
from typing import cast, TYPE_CHECKING
if TYPE_CHECKING:
    import kept_typing
__all__ = ["kept"]


class Größe:
    """kept"""

    steps: Literal["kept"] = 3

    def of(self, x: "kept", *, mode: "kept" = "fast", axis=-1) -> "kept":
        """kept"""
        assert mode != "kept", "kept"
        if mode == "exact" and (x > 0  # a comment + 1
                or not self.steps):
            raise ValueError("kept", f"kept {1 + mode}")
        x = cast("kept", x)
        return [min(y, 1.5, key=abs) for y in x[: self.steps] if y], f"{x!r} kept {2}"

    def where(self, jnp, x, y):
        def inner():
            return jnp.where(x is None, (x + 1), y)

        x += 1
        print(x)
        print(max(x, y))
        plot(x, alpha="kept")
        for _ in zip(x, y, strict="kept"):
            print(y)
        return inner() if x in (y) else "two words"
'''


@pytest.fixture(scope="module")
def random_mutants(mutations):
    return importlib.import_module("support.random_mutants")


@pytest.fixture(scope="module")
def every_mutant(random_mutants):
    return random_mutants.mutants({"jfp8/sizes.py": EVERY_KIND}, 10_000, seed=0)


def test_every_kind_compiles_to_another_program(every_mutant):
    kinds = importlib.import_module("support.mutation_kinds").KINDS
    assert {mutant.kind for mutant in every_mutant} == set(kinds)
    program = ast.dump(ast.parse(EVERY_KIND))
    for mutant in every_mutant:
        assert ast.dump(ast.parse(mutant.planted(EVERY_KIND))) != program, mutant
        lines = zip(EVERY_KIND.splitlines(), mutant.planted(EVERY_KIND).splitlines())
        first = next(i for i, (old, new) in enumerate(lines, start=1) if old != new)
        assert first == mutant.line, mutant


@pytest.mark.parametrize(
    ("kind", "old", "new", "function"),
    [
        ("comparison", 'mode == "exact"', 'mode != "exact"', "Größe.of"),
        ("comparison", "x is None", "x is not None", "Größe.where.<locals>.inner"),
        ("comparison", "x in (y)", "x not in (y)", "Größe.where"),
        ("arithmetic", "x + 1", "x - 1", "Größe.where.<locals>.inner"),
        ("arithmetic", "x += 1", "x -= 1", "Größe.where"),
        ("sign or not", "-1", "1", "Größe.of"),
        ("condition", "y", "not (y)", "Größe.of"),
        ("constant", "3", "4", ""),
        ("constant", '"fast"', "'fast_'", "Größe.of"),
        ("constant", "1.5", "3.0", "Größe.of"),
        ("swapped", "min(y, 1.5, key=abs)", "min(1.5, y, key=abs)", "Größe.of"),
        (
            "swapped",
            "jnp.where(x is None, (x + 1), y)",
            "jnp.where(x is None, (y), x + 1)",
            "Größe.where.<locals>.inner",
        ),
        ("keyword dropped", "min(y, 1.5, key=abs)", "min(y, 1.5)", "Größe.of"),
        ("twin", "min(y, 1.5, key=abs)", "max(y, 1.5, key=abs)", "Größe.of"),
        ("bound", ": self.steps", ": (self.steps) + 1", "Größe.of"),
        ("statement dropped", "print(x)", "pass", "Größe.where"),
    ],
)
def test_what_a_kind_changes(every_mutant, kind, old, new, function):
    found = {(m.kind, m.old, m.new, m.function) for m in every_mutant}
    assert (kind, old, new, function) in found


def test_nothing_is_drawn_that_is_no_bug(random_mutants, every_mutant):
    for mutant in every_mutant:
        planted = mutant.planted(EVERY_KIND)
        if (mutant.kind, mutant.new) != ("statement dropped", "pass"):  # a raise, as a whole
            assert planted.count("kept") == EVERY_KIND.count("kept"), mutant
        assert "two words" in planted
        assert "max(y, x)" not in planted
    sources = {f"{prefix}x.py": EVERY_KIND for prefix in random_mutants.EXCLUDED}
    assert random_mutants.mutants(sources, 10, seed=0) == []


def test_a_seed_draws_the_same_each_time(random_mutants):
    sources = {"jfp8/a.py": EVERY_KIND, "jfp8/b.py": EVERY_KIND}
    drawn = random_mutants.mutants(sources, 20, seed=1)
    assert len(set(drawn)) == 20
    assert {mutant.file for mutant in drawn} == set(sources)
    assert random_mutants.mutants(dict(reversed(sources.items())), 20, seed=1) == drawn
    assert random_mutants.mutants(sources, 20, seed=2) != drawn
    assert random_mutants.mutants(sources, 10, seed=1) == drawn[:10]


@pytest.mark.slow
def test_a_random_bug_is_caught_or_survives(mutations, checkout, monkeypatch, capsys):
    (checkout / "jfp8/__init__.py").write_text(
        "def twice(x):\n    return x + x\n\n\ndef squared(x):\n    return x * x\n"
    )
    (checkout / "tests/test_half.py").write_text(
        "import jfp8\n"
        "def test_twice():\n    assert jfp8.twice(3) == 6\n"
        "def test_nothing():\n    pass\n"
    )
    support = importlib.import_module("support.entered").__file__
    (checkout / "tests/support").mkdir()
    (checkout / "tests/support/entered.py").write_text(Path(support).read_text())
    monkeypatch.setattr(mutations, "ROOT", checkout)
    kept = checkout / "map.json"
    command = ["--random", "9", "--jobs", "1", "--map", str(kept)]
    assert mutations.main(command) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert (summary["mutants"], summary["caught"]) == (2, 1)
    assert summary["survived"] == ["jfp8/__init__.py:6: arithmetic: x * x -> x / x"]
    assert lines[0].startswith("2 tests pass without a bug")
    assert lines[1].startswith("caught ")
    assert lines[1].partition("x - x: ")[2].startswith("tests/test_half.py::test_twice - ")
    assert {"-    return x * x", "+    return x / x"} <= set(lines)
    tests = json.loads(kept.read_text())["tests"]
    assert tests["tests/test_half.py::test_twice"]["entered"] == ["jfp8/__init__.py::twice"]
    assert tests["tests/test_half.py::test_nothing"]["entered"] == []


@pytest.mark.parametrize(
    ("code", "out", "imports", "verdict"),
    [
        (0, "3 passed", True, ("SURVIVED", "3 passed")),
        (1, "FAILED a.py::b - why\n1 failed", True, ("caught", "a.py::b - why")),
        (2, "ERROR a.py - why\n1 error", True, ("caught", "a.py - why")),
        (2, "ERROR a.py - why\n1 error", False, ("no import", "a.py - why")),
        (4, "no tests ran", True, ("DID NOT RUN", "no tests ran")),
        (-11, "..", True, ("caught", "pytest exits with -11: ..")),
    ],
)
def test_what_a_run_of_pytest_says_of_a_mutant(mutations, code, out, imports, verdict):
    random_bugs = importlib.import_module("support.random_bugs")
    ran = subprocess.CompletedProcess([], code, out, "")
    assert random_bugs.verdict_of(ran, lambda: imports) == verdict


def test_the_quickest_tests_that_enter_a_function(random_mutants):
    suite_map = importlib.import_module("support.suite_map")
    entered = {"a": ["f.py::g"], "b": ["f.py::g", "f.py::h"], "c": ["f.py::h"], "d": ["e.py::g"]}
    entries = [suite_map.Entry(test, 1, frozenset(names)) for test, names in entered.items()]
    known = suite_map.SuiteMap(tuple(entries), 4)

    def tests_of(function, seconds=100):
        mutant = random_mutants.Mutant("f.py", 1, function, "constant", 0, "1", "2")
        return "".join(entry.test for entry in known.tests_of(mutant, seconds))

    assert tests_of("g") == "ab"
    assert tests_of("g", seconds=1.5) == "a"
    assert tests_of("") == "abc"
    assert tests_of("i") == ""
