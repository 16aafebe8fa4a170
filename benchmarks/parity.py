"""Train both examples under every recipe and in float32, from the same seeds; print the gaps.

    python benchmarks/parity.py            # everything: over an hour, which may be interrupted
    python benchmarks/parity.py --tasks images --recipes delayed mxfp8 --seeds 0
    python benchmarks/parity.py --table    # the Markdown table of what has been run so far

Gaps are between runs with the same seed, hence the same initial parameters and batches: seeds alone
differ by more. Every run is written to the results file when it ends, and is not repeated by the
next command, which must train as long and with the same versions.

Recipes whose gradients have no scale of their own train with `jfp8.loss_scale()`. The control has
no scales and its loss is shrunk by 1e-3, to which AdamW is invariant: it shows that the comparison
can tell a broken recipe. Its repair adds `jfp8.loss_scale()` and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import optax

import jfp8

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, CONTROL, REPAIR = "float32", "control", "repair"


@dataclass(frozen=True)
class Task:
    """One script of `examples/`, and what of its `result.json` is compared."""

    title: str
    script: str
    steps: int
    loss: str
    accuracy: str | None
    control: tuple[str, ...]


SHRUNK = ("--recipe", "unscaled", "--loss-multiplier", "1e-3")
TASKS = {
    "lm": Task(
        "language model", "train_lm.py", 450, "validation_loss", None, (*SHRUNK, "--fp8-head")
    ),
    "images": Task("ResNet", "train_images.py", 600, "test_loss", "test_accuracy", SHRUNK),
}

# What is run, in the order of the table, and how the table calls it.
LABELS = {
    REFERENCE: "float32",
    **{
        recipe.name: f"`{recipe.__name__}()`"
        for recipe in jfp8.recipes.RECIPES
        if recipe is not jfp8.recipes.Unscaled
    },
    CONTROL: "control: no scales, loss × 10⁻³",
    REPAIR: "the same with `loss_scale()`",
}

Results = dict[str, dict[str, Any]]  # of each task {"conditions", "runs", "gaps"}


def options_of(task: Task, recipe: str) -> list[str]:
    """What the task's script is told."""
    if recipe == REFERENCE:
        return ["--recipe", "none"]
    if recipe in (CONTROL, REPAIR):
        return [*task.control, *(["--loss-scale"] if recipe == REPAIR else [])]
    scaled = ["--loss-scale"] if jfp8.recipes.get(recipe).needs_loss_scale else []
    return ["--recipe", recipe, *scaled]


def train(task: Task, recipe: str, seed: int, steps: int) -> dict[str, Any]:
    """The `result.json` of one run, in a process of its own, which frees all of its memory."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, ROOT / "examples" / task.script, *options_of(task, recipe)]
        command += ["--seed", str(seed), "--steps", str(steps), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(out, "result.json").read_text())


# ---- the results file


def conditions(steps: int, **more: str) -> dict[str, Any]:
    """What must be the same for all runs of a task."""
    versions = {m.__name__: m.__version__ for m in (jax, flax, optax, jfp8)}
    return {"steps": steps, "python": platform.python_version(), **versions, **more}


def read(path: Path) -> Results:
    if not path.exists():
        return {}
    results = json.loads(path.read_text())
    if not set(results) <= set(TASKS):
        raise SystemExit(
            f"{path} holds something else than runs of this script: remove it, or name another "
            "file with --results"
        )
    return results


def write(path: Path, results: Results) -> None:
    """Writes beside `path`, then renames: a crash leaves the old file or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def check_conditions(path: Path, results: Results, name: str, given: dict[str, Any]) -> None:
    """Refuses to mix runs that were not made alike."""
    recorded = results.get(name, {}).get("conditions", {})
    differences = [
        f"{key} was {recorded[key]} and is {value}"
        for key, value in given.items()
        if recorded.get(key, value) != value
    ]
    if differences:
        raise SystemExit(
            f"{path}: its runs of {name} were made otherwise: {'; '.join(differences)}. Runs made "
            "differently are not compared: put things back, repeat all of them with --fresh, or "
            "name another file with --results"
        )


def forget(path: Path, name: str, recipes: list[str], seeds: list[int]) -> None:
    """Removes the runs that are to be repeated, and the conditions with the last of them."""
    results = read(path)
    if name not in results:
        return
    runs = results[name]["runs"]
    for recipe in runs.keys() & set(recipes):
        runs[recipe] = {s: run for s, run in runs[recipe].items() if int(s) not in seeds}
    results[name]["gaps"] = gaps(runs)
    if not any(runs.values()):
        del results[name]
    write(path, results)


def record(path: Path, name: str, recipe: str, seed: int, result: dict[str, Any]) -> None:
    """Adds one run to what the file holds by now."""
    task, results = TASKS[name], read(path)
    made = conditions(
        result["arguments"]["steps"],
        data=result.get("data", "Python's standard library"),
        device=result["device"],
    )
    check_conditions(path, results, name, made)
    of_task = results.setdefault(name, {"conditions": made, "runs": {}})

    run = {"loss": _only(result[task.loss]), "ms_per_step": _only(result["ms_per_step"])}
    if task.accuracy:
        run["accuracy"] = _only(result[task.accuracy])
    of_task["runs"].setdefault(recipe, {})[str(seed)] = run
    of_task["gaps"] = gaps(of_task["runs"])
    write(path, results)


def _only(of_runs: dict[str, float]) -> float:
    (value,) = of_runs.values()
    return value


# ---- the comparison

# Every quantity with the name of its gap, and how far `run` lies above `f32` in that unit.
GAPS = {
    "loss": ("loss_percent", lambda run, f32: 100 * (run / f32 - 1)),
    "accuracy": ("accuracy_points", lambda run, f32: run - f32),
}


def gaps(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Of each recipe and quantity, the gaps of all seeds that float32 was trained from as well."""
    found: dict[str, Any] = {}
    reference = runs.get(REFERENCE, {})
    for recipe, of_seeds in runs.items():
        paired = sorted(of_seeds.keys() & reference.keys(), key=int)
        if recipe == REFERENCE or not paired:
            continue
        found[recipe] = {}
        for quantity, (gap, difference) in GAPS.items():
            if quantity in reference[paired[0]]:
                values = [difference(of_seeds[s][quantity], reference[s][quantity]) for s in paired]
                found[recipe][gap] = {
                    "seeds": {s: round(value, 4) for s, value in zip(paired, values, strict=True)},
                    "mean_abs": round(sum(map(abs, values)) / len(values), 4),
                    "mean": round(sum(values) / len(values), 4),
                }
    return found


def table(results: Results) -> str:
    """Markdown, a row per recipe: gaps of all seeds; the mean of their sizes; their mean.

    The row of float32 has the losses and accuracies themselves.
    """
    head, rows = ["recipe"], {recipe: [label] for recipe, label in LABELS.items()}
    columns = [("lm", "loss"), ("images", "accuracy"), ("images", "loss")]
    for name, quantity in columns:
        if name not in results:
            continue
        runs, gap = results[name]["runs"], GAPS[quantity][0]
        found = gaps(runs)
        seeds = sorted({seed for of_seeds in runs.values() for seed in of_seeds}, key=int)
        title = f"{TASKS[name].title}: gap of {gap.replace('_', ' in ')}"
        head += [f"{title}, seeds {', '.join(seeds)}", "mean of absolute gaps; mean"]
        for recipe, row in rows.items():
            if recipe in found:
                of_recipe = found[recipe][gap]
                row += [_figures(of_recipe["seeds"], seeds, "+.2f")]
                row += [_minus(f"**{of_recipe['mean_abs']:.2f}**; {of_recipe['mean']:+.2f}")]
            else:
                values = {seed: run[quantity] for seed, run in runs.get(recipe, {}).items()}
                shown = values if recipe == REFERENCE else {}
                row += [_figures(shown, seeds, ".4f" if quantity == "loss" else ".2f"), ""]
    kept = [
        row for recipe, row in rows.items() if any(recipe in t["runs"] for t in results.values())
    ]
    lines = [head, ["---"] * len(head), *kept]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figures(of_seeds: dict[str, float], seeds: list[str], spec: str) -> str:
    """The values of all `seeds`, a dash for one that is missing."""
    shown = [format(of_seeds[seed], spec) if seed in of_seeds else "–" for seed in seeds]
    return _minus(", ".join(shown))


def _minus(text: str) -> str:
    return text.replace("-", "−")


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--recipes", choices=LABELS, nargs="+", default=list(LABELS),
                        help="float32 is always among them")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of 450 (lm) and 600 (images)")
    parser.add_argument("--results", metavar="PATH", type=Path,
                        default=ROOT / "benchmarks/results/parity.json")  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="repeat runs, after a change of the library say"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)

    failed = [] if args.table else run_missing(args)
    print(table(read(args.results)))
    if failed:
        raise SystemExit(f"failed, as told above: {'; '.join(failed)}")


def run_missing(args: argparse.Namespace) -> list[str]:
    """Runs what is chosen and not in the file; returns what failed, which stops nothing else."""
    chosen = [recipe for recipe in LABELS if recipe in {REFERENCE, *args.recipes}]
    steps = {name: TASKS[name].steps if args.steps is None else args.steps for name in args.tasks}
    for name in args.tasks:
        if args.fresh:
            forget(args.results, name, chosen, args.seeds)
        check_conditions(args.results, read(args.results), name, conditions(steps[name]))

    failed = []
    for seed, name, recipe in itertools.product(args.seeds, args.tasks, chosen):
        runs = read(args.results).get(name, {}).get("runs", {})
        if str(seed) in runs.get(recipe, {}):
            continue
        print(f"{name}, {recipe}, seed {seed}", file=sys.stderr, flush=True)
        try:
            result = train(TASKS[name], recipe, seed, steps[name])
        except subprocess.CalledProcessError:
            failed.append(f"{name}, {recipe}, seed {seed}")
        else:
            record(args.results, name, recipe, seed, result)
    return failed


if __name__ == "__main__":
    main()
