"""Train the example language model in FP8 and in float32 from the same seeds; print JSON.

The gaps are relative differences of validation losses, always between runs with the same seed,
since seeds alone differ by about one percent. The control has no scales at all in any product, the
logits head included, and its loss is shrunk by 1e-3, to which AdamW is invariant: it shows that the
comparison can tell a broken recipe. Its repair adds `jfp8.loss_scale()` and nothing else.

    python benchmarks/parity.py --seeds 0 1 2      # about 15 minutes on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import sys
import tempfile
from pathlib import Path

import flax
import jax

import jfp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_lm

CONTROL = ["--recipe", "unscaled", "--fp8-head", "--loss-multiplier", "1e-3"]
RUNS = {
    "float32": ["--recipe", "none"],
    "delayed": ["--recipe", "delayed"],
    "current": ["--recipe", "current"],
    "unscaled, loss x 1e-3": CONTROL,
    "unscaled, loss x 1e-3, loss_scale()": [*CONTROL, "--loss-scale"],
}


def train(arguments: list[str], seed: int, steps: int) -> float:
    """Validation loss of one run of `examples/train_lm.py`, in nats per byte."""
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        result = train_lm.main(
            [*arguments, "--seed", str(seed), "--steps", str(steps), "--out", out]
        )
    (loss,) = result["validation_loss"].values()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=450)
    arguments = parser.parse_args()

    losses = {
        name: [train(options, seed, arguments.steps) for seed in arguments.seeds]
        for name, options in RUNS.items()
    }
    results = {}
    for name, of_run in losses.items():
        gaps = [
            100 * (loss / reference - 1)
            for loss, reference in zip(of_run, losses["float32"], strict=True)
        ]
        results[name] = {
            "validation_loss": [round(loss, 4) for loss in of_run],
            "gap_percent": [round(gap, 2) for gap in gaps],
            "mean_abs_gap_percent": round(sum(map(abs, gaps)) / len(gaps), 2),
        }
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (jax, flax, jfp8)}
    print(
        json.dumps(
            {
                "benchmark": "language model parity",
                "seeds": arguments.seeds,
                "steps": arguments.steps,
                "versions": versions,
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
