"""`benchmarks/parity.py`: what it runs, repeats and refuses, and its table; nothing is trained."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest

import jfp8

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def parity():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("parity")


@pytest.fixture
def runs(parity, monkeypatch) -> list[tuple[str, str, int, int]]:
    """The runs that are made, as (script, recipe, seed, steps); their losses are made up."""
    made = []

    def train(task, recipe, seed, steps):
        made.append((task.script, recipe, seed, steps))
        loss = 2.0 + seed + 0.01 * list(parity.LABELS).index(recipe)
        return {
            task.loss: {"run": loss},
            "test_accuracy": {"run": 90 - loss},
            "ms_per_step": {"run": 20.0},
            "device": "cpu",
            "data": "made up",
            "arguments": {"steps": steps},
        }

    monkeypatch.setattr(parity, "train", train)
    return made


@pytest.fixture
def command(parity, tmp_path):
    path = tmp_path / "results" / "parity.json"

    def run(options: str) -> dict:
        parity.main([*options.split(), "--results", str(path)])
        return json.loads(path.read_text())

    run.path = path
    return run


def test_everything_is_run_once(parity, runs, command):
    command("")
    recipes = ["float32", *(r.name for r in jfp8.recipes.RECIPES if r.name != "unscaled")]
    recipes += ["control", "repair"]
    expected = [
        (script, recipe, seed, steps)
        for seed in (0, 1, 2)
        for script, steps in (("train_lm.py", 450), ("train_images.py", 600))
        for recipe in recipes
    ]
    assert runs == expected
    command("")
    assert len(runs) == len(expected)


def test_selection_brings_float32_along(runs, command):
    command("--tasks images --recipes current --seeds 4 --steps 7")
    assert runs == [
        ("train_images.py", "float32", 4, 7),
        ("train_images.py", "current", 4, 7),
    ]


def test_an_interrupted_command_goes_on_where_it_stopped(parity, runs, command, monkeypatch):
    train = parity.train

    def interrupted(task, recipe, seed, steps):
        if len(runs) == 3:
            raise KeyboardInterrupt
        return train(task, recipe, seed, steps)

    selection = "--tasks lm --recipes delayed current --seeds 0 1"
    monkeypatch.setattr(parity, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(selection)
    monkeypatch.setattr(parity, "train", train)
    results = command(selection)
    assert [(recipe, seed) for _, recipe, seed, _ in runs] == [
        (recipe, seed) for seed in (0, 1) for recipe in ("float32", "delayed", "current")
    ]
    assert {recipe: sorted(of) for recipe, of in results["lm"]["runs"].items()} == {
        recipe: ["0", "1"] for recipe in ("float32", "delayed", "current")
    }
    assert [path.name for path in command.path.parent.iterdir()] == ["parity.json"]


def test_fresh_repeats_what_is_selected_and_keeps_the_rest(runs, command):
    before = command("--tasks lm --recipes delayed current --seeds 0 1")
    runs.clear()
    after = command("--tasks lm --recipes delayed --seeds 1 --fresh")
    assert [(recipe, seed) for _, recipe, seed, _ in runs] == [("float32", 1), ("delayed", 1)]
    assert after == before


def test_a_run_that_fails_stops_nothing_else(parity, runs, command, monkeypatch, capsys):
    train = parity.train

    def failing(task, recipe, seed, steps):
        if recipe == "delayed":
            raise subprocess.CalledProcessError(1, task.script)
        return train(task, recipe, seed, steps)

    monkeypatch.setattr(parity, "train", failing)
    with pytest.raises(SystemExit, match="failed, as told above: lm, delayed, seed 0$"):
        command("--tasks lm --recipes delayed current --seeds 0")
    assert "Float8CurrentScaling" in capsys.readouterr().out
    assert sorted(json.loads(command.path.read_text())["lm"]["runs"]) == ["current", "float32"]


def test_other_steps_are_not_mixed_in(runs, command):
    command("--tasks lm --recipes delayed --seeds 0 --steps 5")
    with pytest.raises(SystemExit, match="runs of lm were made otherwise: steps was 5 and is 6"):
        command("--tasks lm --recipes delayed --seeds 1 --steps 6")
    assert len(runs) == 2
    command("--tasks images --recipes delayed --seeds 0 --steps 6")  # another task, other steps
    with pytest.raises(SystemExit, match="steps was 5 and is 6"):
        command("--tasks lm --recipes current --seeds 0 --steps 6 --fresh")  # keeps delayed
    command("--tasks lm --recipes delayed current --seeds 0 --steps 6 --fresh")
    assert runs[-1] == ("train_lm.py", "current", 0, 6)


def test_other_versions_are_not_mixed_in(parity, runs, command, monkeypatch):
    command("--tasks lm --recipes delayed --seeds 0")
    version = jfp8.__version__
    monkeypatch.setattr(jfp8, "__version__", "99.0")
    with pytest.raises(SystemExit, match=f"jfp8 was {version} and is 99.0.*--fresh.*--results"):
        command("--tasks lm --recipes delayed --seeds 1")
    assert len(runs) == 2


def test_other_data_are_not_mixed_in(parity, runs, command, monkeypatch):
    before = command("--tasks images --recipes delayed --seeds 0")
    train = parity.train
    monkeypatch.setattr(parity, "train", lambda *args: {**train(*args), "data": "digits"})
    with pytest.raises(SystemExit, match="data was made up and is digits"):
        command("--tasks images --recipes delayed --seeds 1")
    assert json.loads(command.path.read_text()) == before


def test_a_file_of_something_else_is_left_alone(command):
    command.path.parent.mkdir()
    command.path.write_text('{"benchmark": "something else"}')
    with pytest.raises(SystemExit, match="something else than runs of this script: remove it"):
        command("")
    assert "something else" in command.path.read_text()


def test_gaps_are_between_equal_seeds(parity):
    runs = {
        "float32": {"0": {"loss": 2.0, "accuracy": 80.0}, "1": {"loss": 4.0, "accuracy": 90.0}},
        "delayed": {
            "0": {"loss": 2.02, "accuracy": 80.5},
            "1": {"loss": 3.92, "accuracy": 89.0},
            "2": {"loss": 9.0, "accuracy": 1.0},  # float32 has no such seed
        },
        "current": {"2": {"loss": 9.0, "accuracy": 1.0}},
    }
    assert parity.gaps(runs) == {
        "delayed": {
            "loss_percent": {"seeds": {"0": 1.0, "1": -2.0}, "mean_abs": 1.5, "mean": -0.5},
            "accuracy_points": {"seeds": {"0": 0.5, "1": -1.0}, "mean_abs": 0.75, "mean": -0.25},
        }
    }


def test_the_table(parity, command, capsys):
    canned = {
        "lm": {
            "conditions": {},
            "runs": {
                "float32": {"0": {"loss": 2.0}, "10": {"loss": 2.5}, "2": {"loss": 4.0}},
                "control": {"0": {"loss": 4.0}},
                "delayed": {"2": {"loss": 3.92}, "10": {"loss": 2.5}, "0": {"loss": 2.02}},
            },
        },
        "images": {
            "conditions": {},
            "runs": {
                "float32": {"0": {"loss": 0.5, "accuracy": 80.0}},
                "delayed": {"0": {"loss": 0.495, "accuracy": 80.25}},
            },
        },
    }
    command.path.parent.mkdir()
    command.path.write_text(json.dumps(canned))
    assert command("--table") == canned
    assert capsys.readouterr().out == (
        "| recipe | language model: gap of loss in percent, seeds 0, 2, 10 | "
        "mean of absolute gaps; mean | ResNet: gap of accuracy in points, seeds 0 | "
        "mean of absolute gaps; mean | ResNet: gap of loss in percent, seeds 0 | "
        "mean of absolute gaps; mean |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| float32 | 2.0000, 4.0000, 2.5000 |  | 80.00 |  | 0.5000 |  |\n"
        "| `DelayedScaling()` | +1.00, −2.00, +0.00 | **1.00**; −0.33 | "
        "+0.25 | **0.25**; +0.25 | −1.00 | **1.00**; −1.00 |\n"
        "| control: no scales, loss × 10⁻³ | +100.00, –, – | **100.00**; +100.00 | "
        "– |  | – |  |\n"
    )


@pytest.mark.parametrize("name", ["lm", "images"])
def test_every_run_is_a_command_that_its_script_knows(parity, name):
    """The options reach the script's own parser, and no two runs are the same."""
    task = parity.TASKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS.parent / "examples")
        options = importlib.import_module("lm.options")
        script = importlib.import_module("train_images")
    parser = options.make_parser() if name == "lm" else script.make_parser()
    told = {r: vars(parser.parse_args(parity.options_of(task, r))) for r in parity.LABELS}
    assert told["float32"]["recipe"] == "none"
    assert told["delayed"]["recipe"] == "delayed"
    assert (told["control"]["recipe"], told["control"]["loss_multiplier"]) == ("unscaled", 1e-3)
    assert told["repair"] == {**told["control"], "loss_scale": True}
    assert not told["control"]["loss_scale"]
    assert len({str(options) for options in told.values()}) == len(told)
