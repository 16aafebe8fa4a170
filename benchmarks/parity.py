"""Train three examples under every recipe and in float32, from the same seeds: which are as good?

    python benchmarks/parity.py            # everything, twelve seeds: hours; it may be interrupted
    python benchmarks/parity.py --tasks lm --recipes delayed mxfp8 --seeds 0 1 2
    python benchmarks/parity.py --table    # what has been run so far, as Markdown
    python benchmarks/parity.py --picture gaps.png
    python benchmarks/parity.py --tasks lm --curves training.png

Gaps are between runs with the same seed, hence the same initial parameters and batches: seeds alone
differ by more. A recipe is equivalent within 0.25 (percent of the loss, points of accuracy) only if
the 90 % interval of its mean gap lies inside, see benchmarks/equivalence.py; finding no difference
does not count. Every run is written to the results file when it ends, and is not repeated by the
next command, which must train as long, with the same versions and on as many cores. Runs are made
seed by seed, so that all recipes have the same seeds whenever it is interrupted.

Recipes without a scale for gradients train with `jfp8.loss_scale()`. "attention
too": attention itself is in FP8 as well, in the language model. Three rows are
controls. The twin is float32 with its loss times 3, to which AdamW is invariant but for rounding:
its gaps are what roundings in float32 alone do. The control has no scales and its loss is shrunk by
1e-3: it shows that the comparison can tell a broken recipe. Its repair adds `jfp8.loss_scale()` and
nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results_file
import training_curves
from equivalence import equivalence
from gap_rows import gap_rows
from results_file import ROOT
from side_by_side import CORES, side_by_side

import jfp8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCE, TWIN, CONTROL, REPAIR = "float32", "twin", "control", "repair"
MARGIN, CONFIDENCE = 0.25, 0.9
MEAN_OF = 25  # steps: what is kept of a training curve


@dataclass(frozen=True)
class Task:
    """One script of `examples/`, and the compared entries of its `result.json`."""

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
    "moe": Task("mixture of experts", "train_moe.py", 400, "validation_loss", None, SHRUNK),
}


def _mixed(label: str, *options: str) -> tuple[str, tuple[str, ...]]:
    return label, tuple(word for option in options for word in option.split())


# Several recipes in the language model: their name in the table, and the options of the script.
MIXED = {
    # In attention a layer computes the same under both recipes.
    "delayed+attention": _mixed(
        "`DelayedScaling()`, attention too", "--recipe delayed", "--attention-recipe rowwise"
    ),
    "rowwise+attention": _mixed(
        "`RowwiseScaling()`, attention too", "--recipe rowwise", "--attention-recipe rowwise"
    ),
    "delayed+wgrad": _mixed(
        "`DelayedScaling(wgrad_dtype='bfloat16')`",
        "--recipe delayed",
        "--recipe-fields wgrad_dtype=bfloat16",
    ),
    "block+tiles": _mixed(
        "`Float8BlockScaling(wgrad_tiles=True)`",
        "--recipe block",
        "--recipe-fields wgrad_tiles=True",
    ),
    "block+f32": _mixed(
        "`Float8BlockScaling(scale_rounding=None)`",
        "--recipe block",
        "--recipe-fields scale_rounding=None",
    ),
    "nvfp4_between": _mixed(
        "`nvfp4`, both ends in float32",
        "--recipe nvfp4",
        "--recipe-of block_0/*=none block_3/*=none",
    ),
    "nvfp4_forward": _mixed(
        "`nvfp4`, backward `mxfp8`",
        "--recipe nvfp4",
        "--backward-recipe mxfp8",
    ),
    # The output of `recommend_lm.py`: 23 % of the FLOPs in 8 bits.
    "recommended": _mixed(
        "`nvfp4` as `recommend` says",
        "--recipe nvfp4",
        "--recipe-of block_0/qkv=mxfp8 block_0/down=mxfp8 */out=mxfp8",
    ),
    # 25 %, and the same in all blocks.
    "uniform_qkv": _mixed(
        "`nvfp4`, `mxfp8` in every `qkv`",
        "--recipe nvfp4",
        "--recipe-of */qkv=mxfp8",
    ),
}

# The conditions, in the order of the table, and their names in it.
LABELS = {
    REFERENCE: "float32",
    TWIN: "twin: float32, loss × 3",
    **{
        recipe.name: f"`{recipe.__name__}()`"
        for recipe in jfp8.recipes.RECIPES
        if recipe not in (jfp8.recipes.Unscaled, jfp8.recipes.QuantizationAware)
    },
    **{name: label for name, (label, _) in MIXED.items()},
    CONTROL: "control: no scales, loss × 10⁻³",
    REPAIR: "the same with `loss_scale()`",
}

Results = dict[str, dict[str, Any]]  # by task {"conditions", "runs", "gaps"}


def options_of(task: Task, recipe: str) -> list[str]:
    """Return the options of the task's script."""
    if recipe in (REFERENCE, TWIN):
        return ["--recipe", "none", *(["--loss-multiplier", "3"] if recipe == TWIN else [])]
    if recipe in (CONTROL, REPAIR):
        return [*task.control, *(["--loss-scale"] if recipe == REPAIR else [])]
    if recipe in MIXED:
        return list(MIXED[recipe][1])
    scaled = ["--loss-scale"] if jfp8.recipes.get(recipe).needs_loss_scale else []
    return ["--recipe", recipe, *scaled]


def train(task: Task, recipe: str, seed: int, steps: int, cache: str) -> dict[str, Any]:
    """Return the `result.json` of one run, in a separate process, which frees all its memory.

    Seeds run the same programs: the first one compiles them into the folder `cache`.
    """
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, ROOT / "examples" / task.script, *options_of(task, recipe)]
        command += ["--seed", str(seed), "--steps", str(steps), "--out", out]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        subprocess.run(command, check=True, env=os.environ | compiled, **quiet)
        return json.loads(Path(out, "result.json").read_text())


# ---- the results file


def conditions(steps: int, **more: str) -> dict[str, Any]:
    """Return the conditions that all runs of a task must share."""
    return results_file.conditions(steps=steps, **more)


def read(path: Path) -> Results:
    return results_file.read(path, set(TASKS))


def check_conditions(path: Path, results: Results, name: str, given: dict[str, Any]) -> None:
    recorded = results.get(name, {}).get("conditions", {})
    results_file.check_conditions(path, name, recorded, given)


def forget(path: Path, name: str, recipes: list[str], seeds: list[int]) -> None:
    """Remove the runs to repeat, and the conditions with the last of them."""
    results = read(path)
    if name not in results:
        return
    runs = results[name]["runs"]
    for recipe in runs.keys() & set(recipes):
        runs[recipe] = {s: run for s, run in runs[recipe].items() if int(s) not in seeds}
    results[name]["gaps"] = gaps(runs)
    if not any(runs.values()):
        del results[name]
    results_file.write(path, results)


def record(path: Path, name: str, recipe: str, seed: int, result: dict[str, Any]) -> None:
    """Add one run to the current content of the file."""
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
    run["train_loss"] = curve(result["train_loss"])
    run["commit"] = results_file.commit()
    of_task["runs"].setdefault(recipe, {})[str(seed)] = run
    of_task["runs"] = {
        recipe: dict(sorted(of_task["runs"][recipe].items(), key=lambda item: int(item[0])))
        for recipe in LABELS
        if recipe in of_task["runs"]
    }
    of_task["gaps"] = gaps(of_task["runs"])
    results_file.write(path, results)


def _only(of_runs: dict[str, float]) -> float | None:
    """None if the run diverged: JSON has no NaN."""
    (value,) = of_runs.values()
    return value if math.isfinite(value) else None


def curve(of_runs: dict[str, list[float]]) -> list[float | None]:
    """Return means over `MEAN_OF` steps of the training loss; None if not finite."""
    (losses,) = of_runs.values()
    parts = (losses[begin : begin + MEAN_OF] for begin in range(0, len(losses), MEAN_OF))
    means = map(statistics.fmean, parts)
    return [round(mean, 5) if math.isfinite(mean) else None for mean in means]


# ---- the comparison

# Every quantity with the name of its gap, and how far `run` lies above `f32` in that unit.
GAPS = {
    "loss": ("loss_percent", lambda run, f32: 100 * (run / f32 - 1)),
    "accuracy": ("accuracy_points", lambda run, f32: run - f32),
}
COLUMNS = [("lm", "loss"), ("moe", "loss"), ("images", "accuracy"), ("images", "loss")]
PANELS = COLUMNS[:3]  # the panels of the picture


def gaps(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the gaps of each recipe and quantity, for all seeds shared with float32."""
    found: dict[str, Any] = {}
    reference = runs.get(REFERENCE, {})
    for recipe, of_seeds in runs.items():
        paired = sorted(of_seeds.keys() & reference.keys(), key=int)
        if recipe == REFERENCE or not paired:
            continue
        found[recipe] = {}
        for quantity, (gap, difference) in GAPS.items():
            if quantity in reference[paired[0]]:
                pairs = {s: (of_seeds[s][quantity], reference[s][quantity]) for s in paired}
                whole = {s: difference(*pair) for s, pair in pairs.items() if None not in pair}
                found[recipe][gap] = compared(whole, [s for s in paired if s not in whole])
    return found


def compared(of_seeds: dict[str, float], diverged: list[str]) -> dict[str, Any]:
    """Return gaps, with results of `equivalence`, unless runs diverged."""
    values = list(of_seeds.values())
    told: dict[str, Any] = {"seeds": {s: round(value, 4) for s, value in of_seeds.items()}}
    if diverged:
        return told | {"diverged": diverged, "verdict": "diverged"}
    told |= {"n": len(values), "mean": round(statistics.fmean(values), 4)}
    told["median"] = round(statistics.median(values), 4)
    if len(values) > 1:
        found = equivalence(values, margin=MARGIN, confidence=CONFIDENCE)
        numbers = {name: round(getattr(found, name), 4) for name in ("low", "high")}
        needed = found.pairs_needed if math.isfinite(found.pairs_needed) else None
        told |= {**numbers, "margin": MARGIN, "confidence": CONFIDENCE, "verdict": found.verdict}
        told["pairs_needed"] = needed
    return told


def table(results: Results) -> str:
    """Return Markdown: the float32 runs of each task and quantity, and a row per recipe."""
    parts = []
    for name, quantity in COLUMNS:
        if name not in results or not any(results[name]["runs"].get(REFERENCE, {}).values()):
            continue
        runs, gap = results[name]["runs"], GAPS[quantity][0]
        found, unit = gaps(runs), gap.split("_")[1]
        values = [run[quantity] for run in runs[REFERENCE].values() if run[quantity] is not None]
        spec = ".4f" if quantity == "loss" else ".2f"
        seeds = f"{min(values):{spec}} to {max(values):{spec}} over {len(values)} seeds"
        head = ["recipe", "n", f"mean gap, {unit} [90 % interval]", "median", "verdict"]
        rows = [head, ["---"] * len(head)]
        rows += [[LABELS[r], *_cells(found[r][gap])] for r in LABELS if gap in found.get(r, {})]
        data = results[name]["conditions"].get("data", "made-up data")
        parts.append(f"{TASKS[name].title} on {data}, {quantity}: float32 has {seeds}.\n")
        parts += [f"| {' | '.join(cells)} |" for cells in rows]
        parts.append("")
    commits = {
        str(run.get("commit"))
        for of_task in results.values()
        for of_seeds in of_task["runs"].values()
        for run in of_seeds.values()
    }
    if len(commits) > 1:
        parts.append(f"These runs are of several commits: {', '.join(sorted(commits))}.\n")
    return "\n".join(parts)


def _cells(told: dict[str, Any]) -> list[str]:
    if "diverged" in told:
        n = len(told["seeds"]) + len(told["diverged"])
        return [str(n), "", "", f"{len(told['diverged'])} of {n} diverged"]
    spec = "+.2f" if abs(told["mean"]) < 10 else "+.0f"
    mean, median = (format(told[key], spec) for key in ("mean", "median"))
    if "low" not in told:
        return [str(told["n"]), _minus(f"**{mean}**"), _minus(median), ""]
    verdict = told["verdict"]
    if verdict == "equivalent":
        verdict = f"equivalent within {MARGIN}"
    elif verdict == "inconclusive":
        needed = told["pairs_needed"]
        verdict += f" ({needed:.0f} seeds might)" if needed else " (too close to the margin)"
    else:
        verdict = f"**{verdict}**"
    interval = _minus(f"**{mean}** [{told['low']:{spec}}, {told['high']:{spec}}]")
    return [str(told["n"]), interval, _minus(median), verdict]


def _minus(text: str) -> str:
    return text.replace("-", "−")


def draw(results: Results) -> Figure:
    """Draw a panel for each task and quantity, with a row per recipe of two seeds or more."""
    from matplotlib.figure import Figure

    panels, verdicts = {}, []
    for name, quantity in PANELS:
        gap = GAPS[quantity][0]
        found = gaps(results.get(name, {}).get("runs", {}))
        told = {LABELS[r]: found[r][gap] for r in LABELS if gap in found.get(r, {})}
        verdicts += [t["verdict"] for t in told.values() if "low" in t]
        rows = {label: list(t["seeds"].values()) for label, t in told.items() if "low" in t}
        if rows:
            unit = gap.split("_")[1]
            panels[f"{TASKS[name].title}: {quantity}, {unit} above float32"] = rows
    if not panels:
        raise SystemExit("there is nothing to draw: no recipe has two seeds in common with float32")
    heights = [1.0 + 0.3 * len(rows) for rows in panels.values()]
    figure = Figure((7.0, 0.4 + sum(heights)), layout="constrained")
    equal, different = (verdicts.count(verdict) for verdict in ("equivalent", "different"))
    finding = f"Of {len(verdicts)} comparisons, {equal} are equivalent to float32"
    rest = f"{different} different, {len(verdicts) - equal - different} inconclusive"
    figure.suptitle(f"{finding}, {rest}", fontsize="medium")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (title, rows), ax in zip(panels.items(), axes, strict=True):
        rows = {label.replace("`", ""): values for label, values in rows.items()}
        gap_rows(ax, rows, margin=MARGIN, confidence=CONFIDENCE, limit=5 * MARGIN)
        ax.get_legend().set_title(f"{title[0].upper()}{title[1:]}")
    return figure


def draw_curves(results: Results, names: list[str]) -> Figure:
    """Draw training losses and gaps of every recipe, for tasks with recorded float32 curves."""
    tasks = {}
    for name in names:
        runs = results.get(name, {}).get("runs", {})
        exact = {s for s, run in runs.get(REFERENCE, {}).items() if "train_loss" in run}
        kept = {
            _short(LABELS[recipe]): {
                s: run["train_loss"] for s, run in of.items() if s in exact and "train_loss" in run
            }
            for recipe, of in runs.items()
        }
        if exact:
            tasks[TASKS[name].title] = {label: of for label, of in kept.items() if of}
    if not tasks:
        raise SystemExit("there is nothing to draw: no run of float32 kept its training curve")
    return training_curves.draw(tasks, LABELS[REFERENCE], MEAN_OF, MARGIN)


def _short(label: str) -> str:
    """Return the label for a narrow panel."""
    label = label.replace("`", "").replace(", attention too", " + attention")
    return label.replace("the same", "control")


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--recipes", choices=LABELS, nargs="+", default=list(LABELS),
                        help="float32 is always among them")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(12)))
    parser.add_argument("--steps", type=int, help="instead of 450 (lm), 600 (images) and 400 (moe)")
    parser.add_argument("--jobs", type=int, default=len(CORES) or 1,
                        help="runs at a time, each on one core (%(default)s)")  # fmt: skip
    parser.add_argument("--results", metavar="PATH", type=Path,
                        default=ROOT / "benchmarks/results/parity.json")  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="repeat runs, after a change of the library say"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="run nothing, draw the gaps")
    parser.add_argument("--curves", metavar="FILE", type=Path,
                        help="run nothing, draw losses and gaps over the steps")  # fmt: skip
    args = parser.parse_args(argv)

    if args.picture or args.curves:
        import png

        if args.picture:
            png.save(draw(read(args.results)), args.picture)
        if args.curves:
            png.save(draw_curves(read(args.results), args.tasks), args.curves)
        return
    failed = [] if args.table else run_missing(args)
    print(table(read(args.results)))
    if failed:
        raise SystemExit(f"failed, as told above: {'; '.join(failed)}")


def run_missing(args: argparse.Namespace) -> list[str]:
    """Run the chosen runs missing from the file; return failures, which stop nothing else."""
    chosen = [recipe for recipe in LABELS if recipe in {REFERENCE, *args.recipes}]
    steps = {name: TASKS[name].steps if args.steps is None else args.steps for name in args.tasks}
    for name in args.tasks:
        if args.fresh:
            forget(args.results, name, chosen, args.seeds)
        check_conditions(args.results, read(args.results), name, conditions(steps[name]))

    done = {
        (int(seed), name, recipe)
        for name, of_task in read(args.results).items()
        for recipe, of_seeds in of_task["runs"].items()
        for seed in of_seeds
    }
    work = [
        (seed, name, recipe)
        for seed, name, recipe in itertools.product(args.seeds, args.tasks, chosen)
        if (seed, name, recipe) not in done and (name == "lm" or recipe not in MIXED)
    ]
    failed = []

    def ended(run: tuple[int, str, str], future: Future[dict[str, Any]]) -> None:
        seed, name, recipe = run
        try:
            result = future.result()
        except subprocess.CalledProcessError as error:
            print(error.stderr or error, file=sys.stderr)
            failed.append(f"{name}, {recipe}, seed {seed}")
        else:
            record(args.results, name, recipe, seed, result)
        finished = f"{work.index(run) + 1} of {len(work)}"
        print(f"{finished}: {name}, {recipe}, seed {seed}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as cache:
        one = lambda run: train(TASKS[run[1]], run[2], run[0], steps[run[1]], cache)
        side_by_side(one, work, args.jobs, ended)
    return failed


if __name__ == "__main__":
    main()
