"""`benchmarks/parity.py`: what it runs, repeats, refuses and concludes; nothing is trained."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

import jfp8
from support.scripts import on_path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def parity():
    with on_path("benchmarks"):
        yield importlib.import_module("parity")


@pytest.fixture
def runs(parity, monkeypatch) -> list[tuple[str, str, int, int]]:
    """The runs that are made, as (script, recipe, seed, steps); their losses are made up."""
    made = []

    def train(task, recipe, seed, steps, cache):
        made.append((task.script, recipe, seed, steps))
        loss = 2.0 + seed + 0.01 * list(parity.LABELS).index(recipe)
        return {
            task.loss: {"run": loss},
            "test_accuracy": {"run": 90 - loss},
            "ms_per_step": {"run": 20.0},
            "device": "cpu",
            "data": "made up",
            "arguments": {"steps": steps},
            "train_loss": {"run": [float(step) for step in range(60)]},
        }

    monkeypatch.setattr(parity, "train", train)
    monkeypatch.setattr(parity.results_file, "commit", lambda: "abc")
    return made


@pytest.fixture
def command(parity, tmp_path):
    path = tmp_path / "results" / "parity.json"

    def run(options: str) -> dict:
        parity.main(["--jobs", "1", *options.split(), "--results", str(path)])
        return json.loads(path.read_text())

    run.path = path
    return run


@pytest.mark.slow
def test_everything_is_run_once(parity, runs, command, monkeypatch):
    monkeypatch.setattr(parity, "gaps", lambda runs: {})  # again after each of so many
    command("")
    others = ("unscaled", "qat")
    trained = [r.name for r in jfp8.recipes.RECIPES if r.name not in others]
    recipes = ["float32", "twin", *trained]
    controls = ["control", "repair"]
    mixed = ["delayed+attention", "rowwise+attention", "nvfp4_between", "nvfp4_forward"]
    mixed += ["recommended", "uniform_qkv"]
    tasks = [("train_lm.py", 450, mixed), ("train_images.py", 600, []), ("train_moe.py", 400, [])]
    expected = [
        (script, recipe, seed, steps)
        for seed in range(12)
        for script, steps, more in tasks
        for recipe in (*recipes, *more, *controls)
    ]
    assert runs == expected
    command("")
    assert len(runs) == len(expected)


def test_an_interrupted_command_goes_on_where_it_stopped(parity, runs, command, monkeypatch):
    train = parity.train

    def interrupted(*run):
        if len(runs) == 3:
            raise KeyboardInterrupt
        return train(*run)

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
    # Of two gaps the error of the mean is half their difference; t is 6.313752.
    found = parity.gaps(runs)
    assert list(found) == ["delayed"]
    percent, points = found["delayed"]["loss_percent"], found["delayed"]["accuracy_points"]
    assert percent["seeds"] == {"0": 1.0, "1": -2.0}
    assert points["seeds"] == {"0": 0.5, "1": -1.0}
    assert (percent["n"], percent["mean"], percent["median"]) == (2, -0.5, -0.5)
    assert percent["low"] == pytest.approx(-0.5 - 1.5 * 6.313752, abs=1e-4)
    assert points["high"] == pytest.approx(-0.25 + 0.75 * 6.313752, abs=1e-4)
    assert (percent["verdict"], percent["margin"]) == ("cannot be told", 0.25)


def test_nothing_is_equivalent_that_diverged(parity, runs, command, monkeypatch, capsys):
    train = parity.train

    def diverging(task, recipe, seed, *more):
        result = train(task, recipe, seed, *more)
        if (recipe, seed) == ("current", 1):
            result[task.loss] = {"run": math.nan}
            result["train_loss"] = {"run": [1.0] * 30 + [math.nan] * 30}
        return result

    monkeypatch.setattr(parity, "train", diverging)
    results = command("--tasks lm --recipes delayed current --seeds 0 1 2")
    runs = results["lm"]["runs"]
    assert runs["current"]["1"]["loss"] is None
    assert runs["current"]["1"]["train_loss"] == [1.0, None, None]
    assert runs["current"]["0"]["train_loss"] == [12.0, 37.0, 54.5]  # of 25, 25 and 10 steps
    gap = results["lm"]["gaps"]["current"]["loss_percent"]
    assert (gap["diverged"], gap["verdict"], sorted(gap["seeds"])) == (
        ["1"],
        "diverged",
        ["0", "2"],
    )
    assert "| `Float8CurrentScaling()` | 3 |  |  | 1 of 3 diverged |" in capsys.readouterr().out


CANNED = {
    "lm": {
        "conditions": {"data": "Python's standard library"},
        "runs": {
            "float32": {"0": {"loss": 2.0}, "10": {"loss": 2.5}, "2": {"loss": 4.0}},
            "control": {"0": {"loss": 4.0}, "2": {"loss": 8.0}, "10": {"loss": 5.0}},
            "delayed": {"2": {"loss": 4.004}, "10": {"loss": 2.5}, "0": {"loss": 2.0}},
            "current": {"2": {"loss": 3.92}, "10": {"loss": 2.5}, "0": {"loss": 2.02}},
            "nvfp4": {"2": {"loss": 4.04}},
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


def test_the_table(parity, command, capsys):
    """Of the gaps 0, 0 and 0.1 percent the interval ends 0.0333 * 2.919986 from the mean."""
    command.path.parent.mkdir()
    command.path.write_text(json.dumps(CANNED))
    assert command("--table") == CANNED
    percent = "| recipe | n | mean gap, percent [90 % interval] | median | verdict |\n"
    points = percent.replace("percent", "points")
    rule = "| --- | --- | --- | --- | --- |\n"
    assert capsys.readouterr().out == (
        "language model on Python's standard library, loss: float32 has 2.0000 to 4.0000 over 3 "
        "seeds.\n\n"
        f"{percent}{rule}"
        "| `DelayedScaling()` | 3 | **+0.03** [−0.06, +0.13] | +0.00 | equivalent within 0.25 |\n"
        "| `Float8CurrentScaling()` | 3 | **−0.33** [−2.91, +2.24] | +0.00 | "
        "cannot be told (911 seeds might) |\n"
        "| `NVFP4BlockScaling()` | 1 | **+1.00** | +1.00 |  |\n"
        "| control: no scales, loss × 10⁻³ | 3 | **+100** [+100, +100] | +100 | **different** |\n"
        "\n"
        "ResNet on made-up data, accuracy: float32 has 80.00 to 80.00 over 1 seeds.\n\n"
        f"{points}{rule}"
        "| `DelayedScaling()` | 1 | **+0.25** | +0.25 |  |\n"
        "\n"
        "ResNet on made-up data, loss: float32 has 0.5000 to 0.5000 over 1 seeds.\n\n"
        f"{percent}{rule}"
        "| `DelayedScaling()` | 1 | **−1.00** | −1.00 |  |\n\n"
    )


@pytest.mark.parametrize("name", ["lm", "images", "moe"])
def test_every_run_is_a_command_that_its_script_knows(parity, name):
    """The options reach the script's own parser, and no two runs are the same."""
    task = parity.TASKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS.parent / "examples")
        options = importlib.import_module("lm.options")
        scripts = {"images": "train_images", "moe": "train_moe"}
        script = options if name == "lm" else importlib.import_module(scripts[name])
    parser = script.make_parser()
    runs = [r for r in parity.LABELS if name == "lm" or r not in parity.MIXED]
    told = {r: vars(parser.parse_args(parity.options_of(task, r))) for r in runs}
    assert told["float32"]["recipe"] == "none"
    assert told["twin"] == {**told["float32"], "loss_multiplier": 3.0}
    assert told["delayed"]["recipe"] == "delayed"
    assert (told["control"]["recipe"], told["control"]["loss_multiplier"]) == ("unscaled", 1e-3)
    assert told["repair"] == {**told["control"], "loss_scale": True}
    assert not told["control"]["loss_scale"]
    assert len({str(options) for options in told.values()}) == len(told)
