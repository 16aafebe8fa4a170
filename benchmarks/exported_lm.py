"""Is a model in 4 bits better after quantization-aware training than rounded after training?

For each seed a language model is trained in float32. From the same state, `--aware` steps before
the end, it also goes on under `QuantizationAware`, once for each grid, on the same batches and at
the same learning rates. All of them end after equally many steps, and are then exported by
`jfp8.quantize_params`: the loss is of the bytes to deploy. Gaps are to the
float32 model of the same seed, in percent of its loss, with the 90 % interval of their mean.

    taskset -c 0 nice -n 10 python benchmarks/exported_lm.py      # 12 seeds
    python benchmarks/exported_lm.py --table      # what has been run, as Markdown

Only weights are quantized, all except embeddings and the last layer.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results_file
from equivalence import equivalence
from results_file import ROOT

import jfp8

sys.path.append(str(ROOT / "examples"))
from lm import corpus, training
from lm.model import Transformer

GRIDS = ("mxfp4", "nvfp4")
SIZES = {"width": 128, "layers": 2, "heads": 4, "max_length": 64}
RESULTS = ROOT / "benchmarks/results/exported_lm.json"
RECIPES = {grid: jfp8.recipes.QuantizationAware(grid) for grid in GRIDS}
MODELS = {name: Transformer(**SIZES, recipe=recipe) for name, recipe in RECIPES.items()}
MODELS["f32"] = Transformer(**SIZES)


def losses_of_seed(text: corpus.Corpus, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the validation loss of the float32 model, and of deployed models, for each grid."""
    batch_at = lambda step: text.train_batch(seed, step, args.batch_size)
    validation = text.validation_batches(args.batch_size, args.eval_batches)
    tx, tokens = training.make_optimizer(args.lr, args.steps), batch_at(0)[:, :-1]
    begin = args.steps - args.aware

    def train(state: jfp8.TrainState, first: int, end: int) -> jfp8.TrainState:
        for step in range(first, end):
            state, _ = training.train_step(state, batch_at(step))
        return state

    def deployed(state: jfp8.TrainState, grid: str) -> float:
        params = jfp8.quantize_params(state.params, RECIPES[grid], exempt="head")
        state = state.with_model(MODELS[grid], tokens).replace(params=params)
        return training.validation_loss(state, validation)

    state = train(training.make_state(MODELS["f32"], tx, seed, tokens), 0, begin)
    copied = lambda: jax.tree.map(jnp.copy, state)  # a step donates its inputs
    aware = {grid: copied().with_model(MODELS[grid], tokens) for grid in GRIDS}
    state = train(state, begin, args.steps)
    losses = {"f32": training.validation_loss(state, validation)}
    for grid in GRIDS:
        losses[f"{grid}, rounded after training"] = deployed(state, grid)
        trained = train(aware[grid], begin, args.steps)
        losses[f"{grid}, quantization-aware"] = deployed(trained, grid)
    return losses


def table(runs: dict[str, dict[str, float]]) -> str:
    """Return the gaps of each method to float32, and between both methods."""
    seeds = list(runs.values())
    losses = {name: np.array([run[name] for run in seeds]) for name in seeds[0]}
    gap = lambda name: 100 * (losses[name] / losses["f32"] - 1)
    rows = {name: gap(name) for name in losses if name != "f32"}
    for grid in GRIDS:
        after, aware = f"{grid}, rounded after training", f"{grid}, quantization-aware"
        rows[f"{grid}, the latter less the former"] = rows[aware] - rows[after]
    lines = [
        f"float32 has {losses['f32'].min():.4f} to {losses['f32'].max():.4f}, {len(seeds)} seeds.",
        "",
        "| deployed | mean gap, percent | 90 % interval |",
        "|---|---|---|",
    ]
    for name, gaps in rows.items():
        found = equivalence(gaps)
        lines.append(f"| {name} | {found.mean:+.3f} | {found.low:+.3f} to {found.high:+.3f} |")
    return "\n".join(lines).replace("-0.", "−0.")


def make_parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(12)))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--aware", type=int, default=200, help="of these under the recipe")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3, help="at its peak")
    parser.add_argument("--eval-batches", type=int, default=64)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what has been run, and end")
    return parser


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = make_parser().parse_args(argv)
    results = results_file.read(args.results, {"conditions", "runs"})
    if not args.table:
        text = corpus.load(None, SIZES["max_length"])
        of_run = ("steps", "aware", "batch_size", "lr", "eval_batches")
        how = {name: getattr(args, name) for name in of_run}
        given = results_file.conditions(**how, data=f"{text.name} {text.digest}")
        recorded = results.get("conditions", {})
        results_file.check_conditions(args.results, "the model", recorded, given)
        results = {"conditions": given, "runs": results.get("runs", {})}
        for seed in args.seeds:
            if str(seed) not in results["runs"]:
                start = time.perf_counter()
                results["runs"][str(seed)] = losses_of_seed(text, seed, args)
                results_file.write(args.results, results)
                print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    print(table(results["runs"]))
    return results


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
