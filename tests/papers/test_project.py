"""The repository's own files agree: versions, the support window, workflows and AGENTS.md."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import jfp8

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORT = (ROOT / "docs/support.md").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_one_version_everywhere():
    versions = re.findall(r"^## \[([\d.]+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == jfp8.__version__
    assert versions == sorted(versions, key=Version, reverse=True)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == jfp8.__version__


def supported() -> dict[str, str]:
    """Return the rows of the table of Pythons: the JAX that pip installs for each."""
    return dict(re.findall(r"^\| (3\.\d+) \| ([\d.]+) \|", SUPPORT, re.MULTILINE))


def test_the_support_window_is_that_of_the_package():
    pythons = list(supported())
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    classified = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if ":: Python :: 3." in c]
    untested = re.findall(r"^\| (3\.\d+) .*\| not yet", SUPPORT, re.MULTILINE)
    assert classified == [python for python in pythons if python not in untested]
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (floor,) = (s.version for s in requirement.specifier)
        assert re.search(rf"\b{requirement.name} {re.escape(floor)}[, ]", SUPPORT, re.IGNORECASE)
    lock = (ROOT / ".ci/lock/newest.txt").read_text()
    (old,) = re.findall(r"^jax==([\d.]+) ; python_full_version < '3.12'", lock, re.MULTILINE)
    (new,) = re.findall(r"^jax==([\d.]+) ; python_full_version >= '3.12'", lock, re.MULTILINE)
    newer = dict.fromkeys(pythons[1:], new)
    assert all(
        newer[python].startswith(jax) for python, jax in supported().items() if python in newer
    )
    assert supported()[pythons[0]] == old


def jobs(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def commands(workflow: Path) -> list[str]:
    return [
        step["run"] for job in jobs(workflow).values() for step in job["steps"] if "run" in step
    ]


def test_workflows_run_the_scripts_of_ci():
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "release"}
    called = {path.stem: " ".join(commands(path)) for path in WORKFLOWS}
    assert "bash .ci/run" in called["ci"]
    assert "bash .ci/full --list" in called["nightly"]
    scripts = re.findall(r"\.ci/\w+|examples/\w+\.py", " ".join(called.values()))
    assert all((ROOT / script).is_file() for script in scripts)
    matrix = jobs(ROOT / ".github/workflows/ci.yml")["tests"]["strategy"]["matrix"]
    assert matrix["python"] == list(supported())


def test_any_eight_landings_run_all_parts_of_ci():
    listed = subprocess.check_output(["bash", ROOT / ".ci/full", "--list"], text=True)
    names = listed.split()
    assert len(listed.splitlines()) <= 8
    assert sorted(set(names)) == sorted(names)
    described = re.findall(
        r"^# (slow_1|\w+) (?:\.\.\. slow_5)? {2,}", (ROOT / ".ci/full").read_text(), re.M
    )
    assert {*described, *(f"slow_{i}" for i in range(2, 6))} == set(names)
    assert int((ROOT / ".ci/landing").read_text()) >= 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_little(workflow):
    """No job writes to the repository or names a secret; PyPI trusts the release by its name."""
    text = workflow.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    extra = {
        name: job["permissions"] for name, job in jobs(workflow).items() if "permissions" in job
    }
    assert extra == ({"publish": {"id-token": "write"}} if workflow.stem == "release" else {})


def test_the_code_for_agents_runs():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    scope: dict[str, Any] = {}
    with jax.numpy_rank_promotion("allow"):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(code, scope)
    assert jnp.isfinite(scope["loss"])
    assert scope["state"].step == 1
    for first, second in re.findall(r"\bjfp8\.(\w+)(?:\.(\w+))?", text):
        assert hasattr(getattr(jfp8, first), second or "__doc__"), f"jfp8.{first}.{second}"
    for recipe in re.findall(r'`(?:recipe=)?"(\w+)"`', text):
        assert jfp8.recipes.get(recipe)
