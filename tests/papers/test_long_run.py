"""`benchmarks/long_run.py`: what it measures, repeats and shows; a tiny model only where slow."""

from __future__ import annotations

import importlib
import json
import math

import numpy as np
import pytest

from support.scripts import on_path


@pytest.fixture(scope="module")
def long_run():
    with on_path("benchmarks", "examples"):
        yield importlib.import_module("long_run")


def point(step, losses, held_out, **layers):
    told = {"step": step, "train_loss": losses, "validation_loss": held_out}
    return told | ({"layers": layers} if layers else {})


# Gaps of 1, 1, 3 percent after steps 1, 2 and 3, of 2, 3 and 4 percent after 4, 5 and 6: of six
# steps, fifths end at 1.2, 2.4, 3.6, 4.8 and 6. Of held-out text, 10 and 25 percent.
F32 = [point(3, [4.0, 4.0, 2.0], 2.0), point(6, [2.0, 2.0, 1.0], 2.0)]
DELAYED = [
    point(3, [4.04, 4.04, 2.06], 2.2, up=[6.0, 2.0, 9.0], down=[8.0, 1.0, 9.0]),
    point(6, [2.04, 2.06, 1.04], 2.5, up=[6.0, 2.0, 9.0], down=[2.5, 1.0, 9.0]),
]
CANNED = {"float32": F32, "twin": [F32[0]], "delayed": DELAYED}


@pytest.fixture
def command(long_run, tmp_path, monkeypatch):
    """Runs the command; its processes tell the points of `CANNED` and are listed."""
    path = tmp_path / "long_run.json"
    begun = []

    class Process:
        def __init__(self, command, stdout, text):
            run = command[command.index("--one") + 1]
            begun.append(run)
            self.stdout = [json.dumps(CANNED[run][: n + 1]) for n in range(len(CANNED[run]))]
            self.returncode = 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(long_run.subprocess, "Popen", Process)
    monkeypatch.setattr(long_run.results_file, "commit", lambda: "abc")
    monkeypatch.setattr(long_run, "ROOT", tmp_path)

    def run(text):
        long_run.main(["--jobs", "1", "--results", str(path), *text.split()])
        return json.loads(path.read_text())

    run.begun, run.path = begun, path
    return run


def test_noise_is_what_the_docstring_says(long_run):
    """Gradients (3, 4) and (3, -4), of length 5 and 4 from their mean; errors of length 2."""
    g = np.array([[[3.0, 4.0]], [[3.0, -4.0]]])
    q = g + [[[0.0, 2.0]], [[-2.0, 0.0]]]
    assert long_run.sizes_of_noise(q, g) == pytest.approx((5.0, 2.0, 4.0 * math.sqrt(2)))


def test_the_weakest_layer(long_run):
    assert long_run.weakest(DELAYED[0]) == (3.0, "up")
    assert long_run.weakest(DELAYED[1]) == (2.5, "down")
    assert long_run.weakest(F32[0]) is None


def test_the_table_shows_whether_a_gap_grows(command, capsys):
    command("--steps 6 --recipes delayed twin")
    *_, twin, delayed = capsys.readouterr().out.splitlines()
    assert twin == (
        "| twin: float32, loss × 3 | 3 | +0.00 | +0.00 | +0.00 | – | – | +0.00 |  |  |  |"
    )
    assert delayed == (
        "| `DelayedScaling()` | 6 | +1.00 | +1.00 | +3.00 | +2.00 | +3.50 | +25.00 | 3.0 | 2.5 | "
        "down |"
    )
