"""`benchmarks/optimizer_states.py`: what it runs and repeats, and its intervals.

Nothing is trained.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

import jfp8
from support.scripts import imported

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    return imported("optimizer_states", "benchmarks")


@pytest.fixture
def command(script, tmp_path, monkeypatch):
    """Runs the script on made-up losses; tells what it trained, and what it wrote."""
    path, made = tmp_path / "results" / "states.json", []

    def train(name, seed, steps, of_muon, cores):
        made.append((name, seed))
        if (name, seed) == run.fails_at:
            raise OSError("out of memory")
        above = {"float32": 0.0, "default": 0.001 * (seed - 1)}[name]
        loss = (2.0 + 0.1 * seed) * (1 + above)
        return {"loss": loss, "state_bytes_per_parameter": 2.08, "ms_per_step": 1.0}

    def equivalence(gaps):
        mean = sum(gaps) / len(gaps)
        return types.SimpleNamespace(mean=mean, low=min(gaps), high=max(gaps), verdict="told")

    def run(options: str):
        made.clear()
        script.main([*options.split(), "--optimizers", "default", "--results", str(path)])
        return sorted(made), json.loads(path.read_text())

    run.fails_at = None
    monkeypatch.setattr(script, "train_apart", train)
    monkeypatch.setattr(jfp8.debug, "equivalence", equivalence, raising=False)
    run.path, run.made = path, made
    return run


def test_pairs_of_equal_seeds_and_their_interval(command, capsys):
    made, results = command("--lm --seeds 3")
    assert made == [(name, seed) for name in ("default", "float32") for seed in range(3)]
    found = results["gaps_percent"]["default"]
    assert found["seeds"] == {"0": -0.1, "1": 0.0, "2": 0.1}
    assert (found["mean"], found["low"], found["high"]) == (0.0, -0.1, 0.1)
    assert "+0.00 [-0.10, +0.10] (3 seeds): told" in capsys.readouterr().out.replace(
        "-0.00", "+0.00"
    )


def test_what_has_been_run_is_not_repeated(command):
    command.fails_at = ("float32", 1)
    with pytest.raises(OSError, match="out of memory"):
        command("--lm --seeds 2")
    assert json.loads(command.path.read_text())["runs"]["float32"]["0"]["loss"] == 2.0
    command.fails_at = None
    made, _ = command("--lm --seeds 2")
    assert ("float32", 1) in made
    assert ("float32", 0) not in made
    made, results = command("--lm --seeds 4 --jobs 2")
    assert made == [("default", 2), ("default", 3), ("float32", 2), ("float32", 3)]
    assert list(results["gaps_percent"]["default"]["seeds"]) == ["0", "1", "2", "3"]


def test_other_steps_are_not_mixed_in(command):
    command("--lm --seeds 1")
    with pytest.raises(SystemExit, match="name another file with --results"):
        command("--lm --seeds 2 --steps 5")
    assert command.made == []
