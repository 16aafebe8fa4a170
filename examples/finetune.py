"""Fine-tune in FP8 from a float32 checkpoint, next to fine-tuning in float32, in a minute.

    python examples/finetune.py

FP8 layers have the same parameters as Flax's, in names, shapes and dtype, so any checkpoint in high
precision fits the FP8 model. The amax histories start empty, and the first step uses the amaxes of
its own tensors. This script trains a Transformer in float32 on the source code of Python's standard
library, saves its parameters, loads them into an FP8 model and a float32 model, and trains both on
other text: the English of Python's documentation, as `help()` prints it. More to try:

    finetune.py --from runs/finetune/pretrained.safetensors  # do not pre-train again
    finetune.py --data ~/my_book.txt                          # your own text
    finetune.py --recipe mxfp8                                # another recipe
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm import corpus, options, report, training
from lm.model import Transformer

import jfp8


def make_parser() -> argparse.ArgumentParser:
    files = "pretrained.safetensors, loss.png and result.json"
    parser = options.lm_parser("finetune.py", __doc__, steps=100, files=files)
    parser.set_defaults(lr=1e-3)
    # fmt: off
    parser.add_argument("--recipe", choices=options.RECIPES[:-1], default="delayed",
                        help="where FP8 scales come from (%(default)s)")
    parser.add_argument("--from", dest="pretrained", metavar="PATH",
                        help="parameters that this script saved, in place of pre-training")
    parser.add_argument("--pretrain-steps", type=options.positive_int, default=200,
                        help="(%(default)s)")
    parser.add_argument("--pretrain-lr", type=options.positive_float, default=3e-3,
                        help="at its peak (%(default)s)")
    # fmt: on
    return parser


def make_state(args: argparse.Namespace, recipe: Any, lr: float, steps: int) -> jfp8.TrainState:
    model = Transformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        recipe=recipe,
    )
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    return training.make_state(model, training.make_optimizer(lr, steps), args.seed, tokens)


def pretrain(args: argparse.Namespace, path: Path) -> float:
    """Train in float32, write the parameters to `path`, and return the validation loss."""
    text = corpus.load(None, args.seq_len)
    states = {"f32": make_state(args, None, args.pretrain_lr, args.pretrain_steps)}
    print(f"pre-training in float32 on {text.name}, {args.pretrain_steps} steps")
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    steps = dict.fromkeys(states, training.train_step)
    states, _ = training.train(steps, states, batch_at, args.pretrain_steps)
    jfp8.checkpoint.save(path, states["f32"].params)
    validation = text.validation_batches(args.batch_size, args.eval_batches)
    return training.validation_loss(states["f32"], validation)


def load(state: jfp8.TrainState, path: Path) -> jfp8.TrainState:
    """Return a new training state with the parameters of the file. FP8 state begins empty."""
    try:
        params = jfp8.checkpoint.restore(path, state.params)
    except ValueError as error:
        raise ValueError(
            f"--from {path} does not hold parameters of this model: pass pretrained.safetensors "
            f"of finetune.py, with the same --layers, --width and --seq-len. {error}"
        ) from error
    variables = {**state.variables, "params": params}
    return jfp8.TrainState.create(apply_fn=state.apply_fn, variables=variables, tx=state.tx)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    parser = make_parser()
    args, text, validation = options.parse(parser, argv, corpus.load_documentation)
    path = Path(args.pretrained or Path(args.out, "pretrained.safetensors"))
    if args.pretrained is None:
        loss = pretrain(args, path)
        print(f"validation loss {loss:.4f}; parameters written to {path}")

    labels = {"fp8": f"FP8, {args.recipe}", "f32": "float32"}
    recipes = {"fp8": jfp8.recipes.get(args.recipe), "f32": None}
    states = {run: make_state(args, recipes[run], args.lr, args.steps) for run in labels}
    try:
        states = {run: load(state, path) for run, state in states.items()}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    before = {run: training.validation_loss(state, validation) for run, state in states.items()}
    print(f"fine-tuning on {text.name}; validation loss before it:")
    for run, label in labels.items():
        print(f"  {label:16} {before[run]:.4f}")

    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    steps = dict.fromkeys(states, training.train_step)
    states, numbers = training.train(steps, states, batch_at, args.steps)
    losses = {run: training.validation_loss(s, validation) for run, s in states.items()}
    title = f"Fine-tuning on {text.name}, from a checkpoint in float32"
    more = {f"{run}_before": loss for run, loss in before.items()}
    return report.finish("finetune", title, args, labels, numbers, losses, **more)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
