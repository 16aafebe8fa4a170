"""Find the tensor that breaks, and repair it, with `jfp8.debug`, in two minutes.

    python examples/debug_training.py

A Transformer trains on the source code of Python's standard library in FP8 without scales, with its
loss multiplied by 1e-3, for example by a mean over many tokens or devices. AdamW does not mind, but
gradients become too small for FP8, and the model learns less. `jfp8.debug.Recorder` calls the
training step and collects statistics in every tenth call; `jfp8.debug.advice` lists tensors that
break and a remedy: raise the loss scale, or use a recipe that has scales for gradients. The script
does the latter and trains again. More to try:

    debug_training.py --loss-multiplier 1    # gradients that are large enough
    debug_training.py --every 1              # statistics of every step
    debug_training.py --repair loss_scale    # one scale for all gradients
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm import options, report, training
from lm.model import Transformer

import jfp8
from jfp8 import debug, plot

plt = report.plt


def make_parser() -> argparse.ArgumentParser:
    files = "stats.jsonl, gradients.png, loss.png and result.json"
    parser = options.lm_parser("debug_training.py", __doc__, steps=100, files=files)
    # fmt: off
    parser.add_argument("--loss-multiplier", type=options.positive_float, default=1e-3, metavar="M",
                        help="differentiate M * loss (%(default)s)")
    parser.add_argument("--every", type=options.positive_int, default=10, metavar="N",
                        help="take statistics in every Nth step (%(default)s)")
    parser.add_argument("--repair", choices=("loss_scale", *options.RECIPES[:-1]),
                        default="delayed",
                        help="new in the second training: this recipe, or jfp8.loss_scale() "
                        "around the optimizer (%(default)s)")
    # fmt: on
    return parser


def make_state(args: argparse.Namespace, run: str) -> jfp8.TrainState:
    """Create the state of the `"broken"`, the `"repaired"` or the `"f32"` run."""
    loss_scaled = run == "repaired" and args.repair == "loss_scale"
    name = args.repair if run == "repaired" and not loss_scaled else "unscaled"
    recipe = None if run == "f32" else jfp8.recipes.get(name)
    model = Transformer(args.width, args.layers, args.heads, args.seq_len, recipe)
    tx = training.make_optimizer(args.lr, args.steps, multiplier=args.loss_multiplier)
    tx = jfp8.loss_scale(tx) if loss_scaled else tx
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    return training.make_state(model, tx, args.seed, tokens)


def draw_gradients(path: Path, rows: dict[str, list[debug.TensorStats]]) -> None:
    """Plot the part of each gradient that becomes zero, over the steps of each run."""
    layers = len({row.name for row in rows["broken"] if row.tensor == "grad"})
    figure, axes = plt.subplots(1, 2, figsize=(12, 2 + 0.2 * layers), layout="constrained")
    for axis, (run, of_run) in zip(axes, rows.items(), strict=True):
        plot.heat_map(of_run, "underflow", "grad", ax=axis)
        axis.set_title(f"Gradients, {run}", pad=20)  # above the legend
    figure.suptitle("How much of each gradient becomes zero")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    args, text, validation = options.parse(make_parser(), argv)
    out = Path(args.out)
    stats_file = out / "stats.jsonl"
    stats_file.unlink(missing_ok=True)  # the Recorder appends

    labels = {
        "repaired": f"repaired, {args.repair}",
        "broken": "broken, unscaled",
        "f32": "float32",
    }
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)

    def step(state: jfp8.TrainState, batch: jax.Array) -> tuple[jfp8.TrainState, dict[str, Any]]:
        return training.train_step(state, batch, multiplier=args.loss_multiplier)

    states, numbers, rows = {}, {}, {}
    for run in ("broken", "repaired", "f32"):
        state = make_state(args, run)
        take_step = jax.jit(step)
        if run != "f32":
            jsonl = stats_file if run == "broken" else None
            take_step = recorder = debug.Recorder(step, every=args.every, jsonl=jsonl)
        print(f"training: {labels[run]}")
        # A Recorder compiles two programs: for calls with statistics, and for those without.
        trained, taken = training.train(
            {run: take_step}, {run: state}, batch_at, args.steps, compiling=2
        )
        states |= trained
        numbers |= taken
        if run != "f32":
            rows[run] = recorder.rows
            advice = debug.advice(recorder.rows)
            print(f"\n{advice}\n")
            if run == "broken":
                found = advice
    draw_gradients(out / "gradients.png", rows)

    losses = {run: training.validation_loss(states[run], validation) for run in labels}
    numbers = {run: numbers[run] for run in labels}
    title = "A training run that breaks, and its repair"
    first = found.findings[0] if found.findings else None
    more = {
        "broken_gap_percent": report.relative_gap(losses, "broken"),
        "findings": len(found.findings),
        "first_fault": first and first.fault,
        "first_tensor": first and first.tensor,
        "findings_after_repair": len(advice.findings),
    }
    print(f"written to {out}: stats.jsonl, gradients.png")
    return report.finish("debug_training", title, args, labels, numbers, losses, **more)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
