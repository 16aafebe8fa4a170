"""Train a byte-level Transformer in FP8, next to the same one in float32, on a CPU in two minutes.

    python examples/train_lm.py --compare

The text is the source code of Python's own standard library, so nothing is downloaded. The sixteen
dense layers of the blocks compute in FP8. At the end the script prints both validation losses, and
writes a picture of both curves and a summary into `runs/train_lm`. More to try:

    train_lm.py --compare --recipe unscaled                            # FP8 without scales fails,
    train_lm.py --compare --recipe unscaled --loss-scale               # and a loss scale repairs it
    train_lm.py --checkpoint s.safetensors --checkpoint-every 50       # resume later with --resume
    train_lm.py --compare --data ~/my_book.txt                         # your own text
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from lm import checkpoint, corpus, options, report, training
from lm.model import Transformer
from lm.training import take_steps, validation_loss

import jfp8


def make_model(args: argparse.Namespace, run: str) -> Transformer:
    """Create the `"fp8"` model or its `"f32"` twin."""
    more = dict(args.recipe_fields)
    in_fp8 = lambda n: None if run == "f32" or n == "none" else jfp8.recipes.get(n, **more)
    recipe = in_fp8(args.recipe)
    if recipe is not None and args.backward_recipe:
        backward = args.backward_recipe
        recipe = jfp8.recipes.PerOperand(fprop=recipe, dgrad=backward, wgrad=backward, **more)
    if recipe is not None and args.recipe_of:
        by_layer = {pattern: in_fp8(name) for pattern, name in args.recipe_of}
        exempt = () if args.fp8_head else ("head",)
        return jfp8.convert(make_model(args, "f32"), {**by_layer, "*": recipe}, exempt=exempt)
    return Transformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        recipe=recipe,
        head_recipe=recipe if args.fp8_head else None,
        attention_recipe=in_fp8(args.attention_recipe),
    )


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    tx = training.make_optimizer(args.lr, args.steps, multiplier=args.loss_multiplier)
    return jfp8.loss_scale(tx) if args.loss_scale else tx


def make_state(args: argparse.Namespace, run: str) -> jfp8.TrainState:
    """Create a state; one key gives the FP8 and the float32 model the same parameters."""
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    return training.make_state(make_model(args, run), make_optimizer(args), args.seed, tokens)


def compile_step(
    args: argparse.Namespace, state: jfp8.TrainState, batch: np.ndarray
) -> training.Step:
    return training.train_step.lower(
        state, batch, micro_batches=args.micro_batches, multiplier=args.loss_multiplier
    ).compile()


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Return the content of `result.json`; None if --stop-at ended the run early."""
    parser = options.make_parser(__doc__)
    args = parser.parse_args(argv)
    options.check(parser, args)
    out = Path(args.out)
    try:
        text = corpus.load(args.data, args.seq_len)
        validation = text.validation_batches(args.batch_size, args.eval_batches)
        config = {name: getattr(args, name) for name in options.CHANGES_NUMBERS} | {
            "text": text.digest
        }
        saved = checkpoint.read(args.checkpoint, config) if args.resume else None
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    labels = {"f32": "float32"} if args.recipe == "none" else {"fp8": f"FP8, {args.recipe}"}
    if args.compare:
        labels["f32"] = "float32"
    states = {run: make_state(args, run) for run in labels}
    again = training.copied(states["f32"]) if args.compare else None
    step, lines = 0, []
    if saved is not None:
        step, states, lines = checkpoint.restore(saved, states)
    parameters = sum(p.size for p in jax.tree.leaves(next(iter(states.values())).params))
    print(f"text: {text.periods.size:,} bytes of {text.name}, every 20th block of 4 KiB held out")
    print(f"model: {parameters:,} parameters; training in {' and in '.join(labels.values())}")

    first_batch = text.train_batch(args.seed, 0, args.batch_size)
    with report.compiling():
        steps = {run: compile_step(args, state, first_batch) for run, state in states.items()}

    metrics = report.Metrics(out / "metrics.jsonl", lines)
    last = min(args.steps, args.stop_at or args.steps)
    save_every = args.checkpoint_every or args.steps
    with report.progress_bar(step, args.steps) as bar:
        while step < last:
            end = min(last, *(step - step % n + n for n in (training.STEPS_PER_SYNC, save_every)))
            batches = [text.train_batch(args.seed, s, args.batch_size) for s in range(step, end)]
            states, numbers = take_steps(steps, states, batches)
            metrics.append(step + 1, numbers)
            report.advance(bar, end, numbers)
            step = end
            if args.checkpoint and (step % save_every == 0 or step == last):
                checkpoint.save(args.checkpoint, step, states, metrics.lines, config)
    if step < args.steps:
        print(f"stopped after step {step}: to continue, replace --stop-at by --resume")
        return None

    curves = {run: [line["loss"][run] for line in metrics.lines] for run in labels}
    losses = {run: validation_loss(state, validation) for run, state in states.items()}
    gap, ends = report.relative_gap(losses), dict(losses)
    if args.compare:
        batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
        repeated = training.repeat(steps["f32"], again, batch_at, args.steps)
        ends[report.AGAIN] = validation_loss(repeated, validation)
    noise = report.relative_gap(ends, report.AGAIN)
    result = {
        "validation_loss": losses,
        "gap_percent": gap,
        "noise_percent": noise,
        "parameters": parameters,
        "ms_per_step": metrics.median("ms"),
        **report.environment(),
        "arguments": vars(args),
        "train_loss": curves,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    title = report.headline("Byte-level language model", losses)
    report.draw(out / "loss.png", curves, labels, title, report.legend_of(labels, losses))

    print(report.table(labels, ends, result["ms_per_step"]))
    print(f"written to {out}: metrics.jsonl, loss.png, result.json")
    figures = {
        **losses,
        "gap_percent": gap,
        "noise_percent": noise,
        "steps": args.steps,
        "seed": args.seed,
    }
    print(report.result_line("train_lm", metric="validation_loss", **figures))
    return result


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
