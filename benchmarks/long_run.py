"""Train the language model of the examples ten times as long: does a recipe's gap grow?

    python benchmarks/long_run.py           # every recipe, 4,500 steps: hours; may be interrupted
    python benchmarks/long_run.py --recipes delayed nvfp4 --jobs 1
    python benchmarks/long_run.py --smoke   # a minute, tiny, to see that it works
    python benchmarks/long_run.py --table   # what has been run so far, as Markdown
    python benchmarks/long_run.py --picture long_run.png

There is one run per recipe, from one seed. Float32 and its twin (its loss times 3, which only
changes rounding) show how far runs drift apart by chance: a gap within the twin's says
nothing.
Twenty times in each run it records the mean training loss since the last time, the loss of held-out
text, and for every FP8 weight, over batches that the run never trains on,

    gradient   root mean square over the batches of ||g||: of the gradient in float32
    noise      the same of ||q - g||, where q is the gradient under the recipe, at the same weights
               and with the scales of the run: the noise of quantization, forward and backward
    sampling   the same of ||g - mean g||, times sqrt(K / (K - 1)) for K batches: the noise of the
               choice of a batch

Chmiel et al. (FP4 All the Way, 2025, arXiv:2505.19115) find that training becomes less effective
when gradient / noise falls below about sqrt(3). (They round gradients at random, so that their
noise averages out over steps; rounding to nearest need not average out.)

After an interruption it goes on from checkpoints in `runs/long_run`, with the numbers of a run that
never stopped. The results file is written at each of the twenty points.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import parity
import results_file
from parity import LABELS, REFERENCE
from results_file import ROOT
from side_by_side import CORES, side_by_side

import jfp8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

sys.path.insert(0, str(ROOT / "examples"))
import train_lm
from lm import checkpoint, corpus, options, training

RUNS = [run for run in LABELS if run not in (parity.CONTROL, parity.REPAIR)]
POINTS, MEANS = 20, 5  # records of a run; means of the training loss in each
NOISE_BATCHES = 4
LESS_EFFECTIVE_BELOW = math.sqrt(3)
TINY = ["--width", "32", "--layers", "1", "--seq-len", "32", "--eval-batches", "2"]

Point = dict[str, Any]


# ---- one run, in a separate process


def train(recipe: str, seed: int, steps: int, sizes: list[str], path: Path) -> None:
    """Train from the checkpoint at `path`, if it exists; print all points after each one."""
    told = parity.options_of(parity.TASKS["lm"], recipe)
    args = options.make_parser().parse_args(
        [*told, *sizes, "--seed", str(seed), "--steps", str(steps)]
    )
    run = "f32" if args.recipe == "none" else "fp8"
    text = corpus.load(None, args.seq_len)
    validation = text.validation_batches(args.batch_size, args.eval_batches)
    unseen = [text.train_batch(2**20 + seed, i, args.batch_size) for i in range(NOISE_BATCHES)]
    config = {name: getattr(args, name) for name in options.CHANGES_NUMBERS}
    config["text"] = text.digest

    step, states, points = 0, {run: train_lm.make_state(args, run)}, []
    if path.exists():
        saved = checkpoint.read(str(path), config)
        step, states, points = checkpoint.restore(saved, states)
        print(json.dumps(points), flush=True)
    compiled = {run: train_lm.compile_step(args, states[run], unseen[0])}
    exact = train_lm.make_model(args, "f32").apply

    every = math.ceil(steps / POINTS)
    while step < steps:
        end, losses = min(step - step % every + every, steps), []
        while step < end:
            stop = min(step + training.STEPS_PER_SYNC, end)
            batches = [text.train_batch(seed, i, args.batch_size) for i in range(step, stop)]
            states, numbers = training.take_steps(compiled, states, batches)
            losses += [of_step["loss"] for of_step in numbers[run]]
            step = stop
        points.append(
            {
                "step": step,
                "train_loss": [
                    rounded(np.mean(part, dtype=np.float64))
                    for part in np.array_split(losses, min(MEANS, len(losses)))
                ],
                "validation_loss": rounded(training.validation_loss(states[run], validation)),
            }
        )
        if run == "fp8":
            points[-1]["layers"] = noise_by_layer(states[run], exact, unseen)
        checkpoint.save(str(path), step, states, points, config)
        print(json.dumps(points), flush=True)


def noise_by_layer(state: jfp8.TrainState, exact: Any, batches: list[Any]) -> dict[str, Any]:
    """Return ``{layer: [gradient, noise, sampling]}`` of all FP8 weights; see this file's top."""
    pairs = [_gradients(state, batch, exact=exact) for batch in batches]
    found = {}
    for layer in sorted(pairs[0][0]):
        q, g = (
            np.stack([np.asarray(pair[i][layer], np.float64) for pair in pairs]) for i in (0, 1)
        )
        found[layer] = [rounded(number) for number in sizes_of_noise(q, g)]
    return found


def sizes_of_noise(q: np.ndarray, g: np.ndarray) -> tuple[float, float, float]:
    """Return gradient, noise and sampling of quantized, exact gradients ``f64[batches, ...]``."""
    rms_norm = lambda x: float(np.sqrt((x**2).sum() / len(x)))
    correction = math.sqrt(len(g) / (len(g) - 1))
    return rms_norm(g), rms_norm(q - g), rms_norm(g - g.mean(axis=0)) * correction


def _fp8_kernels(params: Any) -> dict[str, jax.Array]:
    """Return the weights of the blocks' dense layers; the head is in float32."""
    return {
        f"{block}/{layer}": leaves["kernel"]
        for block, layers in params.items()
        if block.startswith("block_")
        for layer, leaves in layers.items()
        if "kernel" in leaves
    }


@functools.partial(jax.jit, static_argnames="exact")
def _gradients(state: jfp8.TrainState, batch: Any, *, exact: Any) -> tuple[Any, Any]:
    loss_fn = lambda variables, batch: training.cross_entropy(state, variables, batch)
    _, quantized = jfp8.value_and_grad(loss_fn)(state, batch)
    loss = lambda p: training.next_byte_loss(exact({"params": p}, batch[:, :-1]), batch)
    return _fp8_kernels(quantized.params), _fp8_kernels(jax.grad(loss)(state.params))


def rounded(number: float) -> float | None:
    """Round to six digits; None if not finite, which JSON cannot represent."""
    return float(f"{number:.6g}") if math.isfinite(number) else None


# ---- all of them


def run_missing(args: argparse.Namespace) -> list[str]:
    """Run the chosen runs that are unfinished; return the failed ones."""
    steps, sizes = (40, TINY) if args.smoke else (args.steps, [])
    given = results_file.conditions(steps=steps, seed=args.seed, sizes=sizes)
    results = read(args.results)
    folder = ROOT / "runs" / "long_run"
    path_of = lambda run: folder / f"{args.results.stem}-{run}-{args.seed}.safetensors"
    chosen = [run for run in RUNS if run in {REFERENCE, *args.recipes}]
    if args.fresh or args.smoke:
        for run in chosen:
            path_of(run).unlink(missing_ok=True)
            results.get("runs", {}).pop(run, None)
    if not results.get("runs"):
        results = {"conditions": given, "runs": {}}
    results_file.check_conditions(args.results, "the language model", results["conditions"], given)

    lock = threading.Lock()

    def record(run: str, points: list[Point]) -> None:
        with lock:
            results["runs"][run] = {"commit": results_file.commit(), "points": points}
            results["runs"] = {r: results["runs"][r] for r in RUNS if r in results["runs"]}
            results_file.write(args.results, results)
            print(f"{run}: step {points[-1]['step']} of {steps}", file=sys.stderr, flush=True)

    def follow(run: str) -> None:
        what = [run, str(args.seed), str(steps), json.dumps(sizes), str(path_of(run))]
        command = [sys.executable, __file__, "--one", *what]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                record(run, json.loads(line))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    failed = []

    def ended(run: str, future: Future[None]) -> None:
        try:
            future.result()
        except subprocess.CalledProcessError:
            failed.append(run)

    work = [run for run in chosen if last_step(results["runs"].get(run)) < steps]
    side_by_side(follow, work, args.jobs, ended)
    return failed


def read(path: Path) -> dict[str, Any]:
    return results_file.read(path, {"conditions", "runs"})


def last_step(run: dict[str, Any] | None) -> int:
    return run["points"][-1]["step"] if run else 0


# ---- what came out


def train_gaps(run: list[Point], f32: list[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return percent by which mean training losses exceed float32's, after the steps at which each
    mean ends: all are on the same batches."""
    begin, at, losses = 0, [], []
    for p, q in zip(run, f32):
        at += np.linspace(begin, p["step"], len(p["train_loss"]) + 1)[1:].tolist()
        losses += zip(p["train_loss"], q["train_loss"])
        begin = p["step"]
    pairs = np.array(losses, np.float64)
    return np.array(at), 100 * (pairs[:, 0] / pairs[:, 1] - 1)


def validation_gaps(run: list[Point], f32: list[Point]) -> np.ndarray:
    """Return percent by which losses of held-out text exceed float32's."""
    pairs = [(p["validation_loss"], q["validation_loss"]) for p, q in zip(run, f32)]
    losses = np.array(pairs, np.float64)
    return 100 * (losses[:, 0] / losses[:, 1] - 1)


def weakest(point: Point) -> tuple[float, str] | None:
    """Return the least gradient / noise of all layers, and its layer; None without FP8."""
    ratios = {
        layer: gradient / noise if noise else math.inf
        for layer, (gradient, noise, _) in point.get("layers", {}).items()
        if gradient is not None and noise is not None
    }
    layer = min(ratios, key=lambda layer: ratios[layer], default=None)
    return None if layer is None else (ratios[layer], layer)


def points_of(results: dict[str, Any]) -> dict[str, list[Point]]:
    runs = {name: run["points"] for name, run in results.get("runs", {}).items()}
    if len(runs) < 2 or REFERENCE not in runs:
        raise SystemExit("there is nothing to compare yet: run float32 and a recipe")
    return runs


def table(results: dict[str, Any]) -> str:
    """Return Markdown: gaps of the training loss in each fifth of the run, and final values."""
    runs, steps = points_of(results), results["conditions"]["steps"]
    fifths = [f"{n}/5" for n in range(1, 6)]
    head = ["recipe", "steps", *(f"gap in {fifth}, %" for fifth in fifths), "held-out gap, %"]
    head += ["least gradient / noise, first", "last", "in"]
    rows = [head, ["---"] * len(head)]
    for name, points in runs.items():
        if name == REFERENCE:
            continue
        at, trained = train_gaps(points, runs[REFERENCE])
        parts = [trained[np.ceil(at * 5 / steps) == n] for n in range(1, 6)]
        held_out = validation_gaps(points, runs[REFERENCE])[-1:]
        gaps = [f"{part.mean():+.2f}" if part.size else "–" for part in (*parts, held_out)]
        gaps = [gap.replace("-", "−") for gap in gaps]
        first, last = weakest(points[0]), weakest(points[-1])
        noise = [f"{first[0]:.1f}", f"{last[0]:.1f}", last[1]] if first and last else ["", "", ""]
        rows.append([LABELS[name], str(points[-1]["step"]), *gaps, *noise])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


DRIFT = 1.5  # percent, of the training loss: the title names the recipes beyond


def draw(results: dict[str, Any]) -> Figure:
    """Draw gaps of training loss and of held-out text, and the weakest gradient, against steps."""
    from matplotlib.figure import Figure

    runs = points_of(results)
    figure = Figure((7.0, 8.0), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    f32 = runs.pop(REFERENCE)
    for name, points in runs.items():
        label = LABELS[name].replace("`", "")
        at, gaps = train_gaps(points, f32)
        steps = [p["step"] for p in points]
        window = min(MEANS, len(gaps))
        jfp8.plot.loss_curves({label: gaps}, steps=at, window=window, ax=top)
        held_out = validation_gaps(points, f32)
        jfp8.plot.loss_curves({label: held_out}, steps=steps[: len(held_out)], ax=middle)
        ratios = [found[0] if (found := weakest(p)) else math.nan for p in points]
        jfp8.plot.loss_curves({label: ratios}, steps=steps, ax=bottom)
    for ax, title in ((top, "training loss, smoothed"), (middle, "loss of held-out text")):
        ax.axhline(0, color="0.5", linewidth=1)
        ax.set(ylabel="above float32 (%)", xlabel="")
        ax.set_title(title, fontsize="small", loc="left")
    ends = {
        line.get_label(): line.get_ydata()[-1] for line in top.lines if len(line.get_xdata()) > 2
    }
    drifting = " and ".join(label for label, end in ends.items() if end > DRIFT)
    steps = f"{runs[next(iter(runs))][-1]['step']:,} steps"
    finding = f"After {steps} only {drifting} are more than {DRIFT} % above float32"
    figure.suptitle(finding, fontsize="medium")
    bottom.axhline(LESS_EFFECTIVE_BELOW, color="0.5", linewidth=1, linestyle="--")
    bottom.set(ylabel="gradient / noise", xlabel="optimizer step")
    bottom.set_ylim(bottom=0)
    title = "gradient / quantization noise of the weakest layer; dashed: √3"
    bottom.set_title(title, fontsize="small", loc="left")
    lines = top.get_legend_handles_labels()
    for ax in (top, middle, bottom):
        ax.get_legend().remove()
    figure.legend(*lines, loc="outside lower center", frameon=False, fontsize="small", ncols=3)
    return figure


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", choices=RUNS, nargs="+", default=RUNS,
                        help="float32 is always among them")  # fmt: skip
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(CORES) or 1,
                        help="runs at a time, each on one core (%(default)s)")  # fmt: skip
    parser.add_argument("--results", metavar="PATH", type=Path)
    parser.add_argument("--fresh", action="store_true", help="restart the chosen runs")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 40 steps, aside")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="run nothing, draw")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # `run_missing` passes it
    args = parser.parse_args(argv)
    if args.one:
        run, seed, steps, sizes, path = args.one
        train(run, int(seed), int(steps), json.loads(sizes), Path(path))
        return
    place = "runs/long_run/smoke.json" if args.smoke else "benchmarks/results/long_run.json"
    args.results = args.results or ROOT / place
    if args.picture:
        import png

        png.save(draw(read(args.results)), args.picture)
        return
    failed = [] if args.table else run_missing(args)
    if failed:
        raise SystemExit(f"failed, as told above: {', '.join(failed)}")
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
