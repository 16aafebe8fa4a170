"""What jfp8 is built of, and what it does to a machine: no network, nothing that runs code."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import jfp8

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(jfp8.__file__).parent
LOCKS = ROOT / ".ci" / "lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_core_needs_five_packages():
    names = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert names == {"jax", "flax", "optax", "numpy", "ml_dtypes"}


def requirements(extras: list[str]) -> dict[str, Requirement]:
    """What an installation with `extras` asks for by itself; extras may name extras of jfp8."""
    found = {}
    texts = [*PROJECT["dependencies"]]
    while extras:
        texts += PROJECT["optional-dependencies"][extras.pop()]
    for text in texts:
        requirement = Requirement(text)
        if requirement.name == "jfp8":
            found |= requirements(list(requirement.extras))
        else:
            found[requirement.name.replace("_", "-").lower()] = requirement
    return found


def test_every_requirement_has_a_floor():
    for name in PROJECT["optional-dependencies"]:
        for requirement in requirements([name]).values():
            assert any(s.operator in (">=", "==") for s in requirement.specifier), str(requirement)


def pinned(lock: Path) -> dict[str, set[Version]]:
    """Versions by package; several where they differ by Python."""
    versions: dict[str, set[Version]] = {}
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, version in pins:
        versions.setdefault(name, set()).add(Version(version))
    return versions


@pytest.mark.parametrize("name", ["newest", "jax_0.11", "lowest"])
def test_locks_pin_all_that_ci_installs(name):
    versions = pinned(LOCKS / f"{name}.txt")
    for package, requirement in requirements(["dev"]).items():
        assert package in versions, f"{package} is in no {name}.txt; run bash .ci/lock/update"
        for version in versions[package]:
            assert version in requirement.specifier, f"{package} {version}: {requirement}"
    assert {"hatchling", "editables"} <= set(versions), "what builds the wheel"


@pytest.mark.parametrize(
    ("name", "least"), [("newest", 100), ("jax_0.11", 100), ("lowest", 100), ("trainers", 15)]
)
def test_every_pin_has_a_hash(name, least):
    entries = re.split(r"^(?=[a-z])", (LOCKS / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > least
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]


def test_the_lowest_lock_has_the_floors():
    """Of the five; of a Python that has no wheel of a floor, the first that it has."""
    versions = pinned(LOCKS / "lowest.txt")
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        (floor,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
        assert min(versions[requirement.name.replace("_", "-")]) == floor


def test_the_lock_of_trainers_has_the_versions_that_were_asked_for():
    versions = pinned(LOCKS / "trainers.txt")
    lines = (LOCKS / "trainers.in").read_text().splitlines()
    asked = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {requirement.name for requirement in asked} == set(versions)
    for requirement in asked:
        (version,) = versions[requirement.name]
        assert version in requirement.specifier
    # The rest of what they import; pip is told to take nothing else.
    assert not set(versions) & set(pinned(LOCKS / "jax_0.11.txt"))


RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "msgpack"}
RUNS_CODE |= {"shelve", "subprocess", "socket", "urllib", "requests", "http", "ctypes"}


def sins(source: str) -> list[str]:
    """Imports of what runs code or opens connections, and calls that evaluate text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_CODE:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "compile", "__import__", "yaml.load", "os.system"}:
                found.append(called)
            found += [f"{called}({k.arg}=)" for k in node.keywords if k.arg == "allow_pickle"]
    return found


def test_nothing_runs_code_or_opens_connections():
    """But the commands for a GPU, which measure in processes of their own."""
    assert len(sins("from pickle import loads\nimport urllib.request\neval('1')")) == 3
    assert sins("np.load(path, allow_pickle=True)")
    found = {path: sins(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path.parent.name for path, what in found.items() if what} == {"command_line"}
    readers = [path for path in found if path.parent.name == "checkpoint"]
    assert len(readers) > 6
    assert not any(re.search(r"importlib|import_module", path.read_text()) for path in readers)


# Python itself reports connections, processes and deserialized code to audit hooks.
WATCHED = """
import sys, jax, flax.linen as nn, optax, numpy as np, orbax.checkpoint, safetensors.numpy
watched = []
EVENTS = ("socket.", "urllib.", "http.", "subprocess.", "os.system", "os.exec", "os.fork",
          "pickle.find_class", "os.putenv")
on = [False]
def hook(event, arguments):
    if on[0] and event.startswith(EVENTS) and event != "socket.__new__":
        watched.append((event, str(arguments)[:100]))
sys.addaudithook(hook)
jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))  # the compiler's own first time
on[0] = True
{code}
on[0] = False
assert not watched, watched
"""
TRAINS = """
import jfp8, tempfile, pathlib
model, x = nn.Sequential([jfp8.Dense(8), nn.relu, jfp8.Dense(2)]), np.ones((4, 8), np.float32)
tx = optax.chain(jfp8.loss_scale(), jfp8.optim.adam(1e-3))
variables = model.init(jax.random.key(0), x)
state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
loss_fn = lambda variables, x: (model.apply(variables, x).sum(), dict())
loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
state = state.apply_gradients(grads)
folder = pathlib.Path(tempfile.mkdtemp())
jfp8.checkpoint.save(folder / "state.safetensors", state)
restored = jfp8.checkpoint.restore(folder / "state.safetensors", state)
assert int(restored.step) == 1
"""


def watch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED.format(code=code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_no_network_no_process_no_pickle():
    done = watch(TRAINS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "sin",
    [
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
        "import pickle; pickle.loads(pickle.dumps(print))",
    ],
)
def test_the_watch_sees(sin):
    done = watch(sin)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr
