"""`mutations.py`: mutants are other programs, the same for the same seed, and are caught or not."""

import importlib
import json

import pytest

from mutants import EXCLUDED, KINDS, Mutant, candidates, mutants

# One place or more for every kind of change. A change of "kept" could not be noticed.
EVERY_KIND = '''
"""kept"""
__all__ = ["kept"]
Kind = Literal["kept"]
if TYPE_CHECKING:
    import kept

class Größe:
    steps: int = 3

    def of(self, x: "kept", *, mode: "kept" = "fast") -> "kept":
        assert mode != "kept", "kept"
        if mode == "exact" and (x > 0  # a comment + 1
                or not self.steps):
            raise ValueError("kept", f"kept {1 + mode}")
        x = jnp.where(x, (x + 1), cast("kept", x))
        print(x)
        plot(x, alpha="kept", **{"zorder": "kept"})
        return [min(y, 1.5, key=abs) for y in x[: self.steps] if y], f"{x!r} kept {2}"
'''


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("comparison", 'mode == "exact"', "(mode != 'exact')"),
        ("operation", "x + 1", "(x - 1)"),
        ("condition", "y", "(not y)"),
        ("constant", "3", "(4)"),
        ("bound", "self.steps", "(self.steps + 1)"),
        ("swapped", "min(y, 1.5, key=abs)", None),
        (
            "swapped",
            'jnp.where(x, (x + 1), cast("kept", x))',
            "(jnp.where(x, cast('kept', x), x + 1))",
        ),
        ("twin", "min", "(max)"),
        ("dropped", "print(x)", "pass"),
    ],
)
def test_kinds(kind, old, new):
    found = {(m.kind, m.old): m.new for m in candidates("jfp8/a.py", EVERY_KIND)}
    assert found.get((kind, old)) == new


def test_mutants_are_other_programs_that_could_be_bugs():
    drawn = mutants({"jfp8/a.py": EVERY_KIND}, 1000, "0")
    assert drawn[:9] == mutants({"jfp8/a.py": EVERY_KIND}, 9, "0")
    assert {mutant.kind for mutant in drawn} == {kind.__name__ for kind in KINDS}
    for mutant in drawn:
        planted = mutant.planted(EVERY_KIND)
        compile(planted, "planted", "exec")
        if mutant.kind != "dropped":
            assert planted.count("kept") == EVERY_KIND.count("kept"), mutant
            assert "if TYPE_CHECKING:" in planted
    assert mutants({f"{prefix}x.py": EVERY_KIND for prefix in EXCLUDED}, 10, "0") == []


@pytest.fixture
def mutations(tmp_path, monkeypatch):
    """The program, for a package of two functions whose tests look at one."""
    program = importlib.import_module("mutations")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    (tmp_path / "jfp8/sizes").mkdir(parents=True)
    (tmp_path / "tests/sizes").mkdir(parents=True)
    (tmp_path / "jfp8/__init__.py").touch()
    (tmp_path / "jfp8/sizes/__init__.py").write_text(
        "def twice(x):\n    return x + x\n\n\ndef squared(x):\n    return x * x\n"
    )
    (tmp_path / "tests/sizes/test_twice.py").write_text(
        "from jfp8 import sizes\ndef test_twice():\n    assert sizes.twice(3) == 6\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return program


def test_a_survivor_is_printed_and_no_failure(mutations, capsys):
    assert mutations.main(["--random", "9"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert (summary["mutants"], summary["caught"]) == (2, 1)
    assert summary["SURVIVED"] == ["jfp8/sizes/__init__.py:6: operation: x * x -> (x / x)"]
    assert any("test_twice.py::test_twice" in line for line in lines if "caught" in line)
    assert {"-    return x * x", "+    return (x / x)"} <= set(lines)


def test_a_mutant_that_never_ends_has_no_answer(mutations, tmp_path):
    mutant = Mutant("jfp8/sizes/__init__.py", 2, "operation", 24, "x + x", "(x - x)")
    tests = ["tests/sizes/test_twice.py"]
    trial = mutations.tried(mutant, tmp_path, tests, tmp_path / "cache", 0.01)
    assert trial.verdict == "TIMED OUT"
