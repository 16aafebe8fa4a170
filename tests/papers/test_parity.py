"""`benchmarks/parity.py`: what it runs, repeats, refuses and concludes; nothing is trained."""

import json
import math

import pytest

from support.scripts import imported

parity = imported("parity", "benchmarks")


@pytest.fixture
def runs(monkeypatch) -> list[tuple[str, str, int, int]]:
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
def command(tmp_path):
    path = tmp_path / "results" / "parity.json"

    def run(options: str) -> dict:
        parity.main(["--jobs", "1", *options.split(), "--results", str(path)])
        return json.loads(path.read_text())

    run.path = path
    return run


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


def test_gaps_are_between_equal_seeds():
    runs = {
        "float32": {"0": {"loss": 2.0, "accuracy": 80.0}, "1": {"loss": 4.0, "accuracy": 90.0}},
        "delayed": {
            "0": {"loss": 2.02, "accuracy": 80.5},
            "1": {"loss": 3.92, "accuracy": 89.0},
            "2": {"loss": 9.0, "accuracy": 1.0},  # float32 has no such seed
        },
        "current": {"2": {"loss": 9.0, "accuracy": 1.0}},
    }
    # The error of the mean of two gaps is half their difference; t is 6.313752.
    found = parity.gaps(runs)
    assert list(found) == ["delayed"]
    percent, points = found["delayed"]["loss_percent"], found["delayed"]["accuracy_points"]
    assert percent["seeds"] == {"0": 1.0, "1": -2.0}
    assert points["seeds"] == {"0": 0.5, "1": -1.0}
    assert (percent["n"], percent["mean"], percent["median"]) == (2, -0.5, -0.5)
    assert percent["low"] == pytest.approx(-0.5 - 1.5 * 6.313752, abs=1e-4)
    assert points["high"] == pytest.approx(-0.25 + 0.75 * 6.313752, abs=1e-4)
    assert (percent["verdict"], percent["margin"]) == ("inconclusive", 0.25)
    of_three = parity.compared({"0": 0.0, "1": 0.0, "2": 3.0}, [])
    assert (of_three["n"], of_three["mean"], of_three["median"]) == (3, 1.0, 0.0)


def test_nothing_is_equivalent_that_diverged(runs, command, monkeypatch, capsys):
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
    assert runs["current"]["0"]["train_loss"] == [12.0, 37.0, 54.5]  # means of 25, 25 and 10 steps
    gap = results["lm"]["gaps"]["current"]["loss_percent"]
    assert (gap["diverged"], gap["verdict"], sorted(gap["seeds"])) == (
        ["1"],
        "diverged",
        ["0", "2"],
    )
    assert "| `Float8CurrentScaling()` | 3 |  |  | 1 of 3 diverged |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lm", "images", "moe"])
def test_every_run_is_a_command_that_its_script_knows(name):
    """The options reach the script's own parser, and no two runs are the same."""
    task = parity.TASKS[name]
    scripts = {"lm": "lm.options", "images": "train_images", "moe": "train_moe"}
    parser = imported(scripts[name], "examples").make_parser()
    runs = [r for r in parity.LABELS if name == "lm" or r not in parity.MIXED]
    told = {r: vars(parser.parse_args(parity.options_of(task, r))) for r in runs}
    assert told["float32"]["recipe"] == "none"
    assert told["twin"] == {**told["float32"], "loss_multiplier": 3.0}
    assert told["delayed"]["recipe"] == "delayed"
    assert (told["control"]["recipe"], told["control"]["loss_multiplier"]) == ("unscaled", 1e-3)
    assert told["repair"] == {**told["control"], "loss_scale": True}
    assert not told["control"]["loss_scale"]
    assert len({str(options) for options in told.values()}) == len(told)
