"""Distill a language model into 4-bit weights, and compare with rounding it after training.

    python examples/quantization_aware.py

A Transformer is trained in float32 on the source code of Python's standard library: the teacher.
The student begins with its parameters. Its forward pass multiplies weights on the grid of the
checkpoint that will be deployed, and it learns the teacher's probabilities. `jfp8.quantize_params`
then returns the bytes to deploy: the exact values of the last forward pass. Takes less
than a minute on two cores. More to try:

    quantization_aware.py --weights nvfp4            # another grid
    quantization_aware.py --activations mxfp8        # activations in 8 bits too
    quantization_aware.py --backward high_precision  # gradients of the unquantized weights
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import optax
from lm import corpus, options, report, training
from lm.model import Transformer

import jfp8


def make_parser() -> argparse.ArgumentParser:
    parser = options.lm_parser("quantization_aware.py", __doc__, steps=200)
    parser.set_defaults(width=64, layers=2, heads=2, seq_len=64, eval_batches=32, lr=1e-3)
    grids = ("block", "rowwise", "mxfp8", "mxfp4", "nvfp4")
    # fmt: off
    parser.add_argument("--teacher-steps", type=options.positive_int, default=500,
                        help="(%(default)s)")
    parser.add_argument("--teacher-lr", type=options.positive_float, default=5e-3,
                        help="at its peak (%(default)s)")
    parser.add_argument("--weights", choices=grids, default="mxfp4",
                        help="the grid of the weights (%(default)s)")
    parser.add_argument("--activations", choices=grids,
                        help="the grid of the activations (high precision)")
    parser.add_argument("--backward", choices=("dequantized", "high_precision", "mxfp8"),
                        default="dequantized", help="(%(default)s)")
    # fmt: on
    return parser


def make_model(args: argparse.Namespace, recipe: Any) -> Transformer:
    sizes = {"width": args.width, "layers": args.layers, "heads": args.heads}
    return Transformer(**sizes, max_length=args.seq_len, recipe=recipe)


@jax.jit
def distill(
    teacher: jfp8.TrainState, student: jfp8.TrainState, windows: jax.Array
) -> tuple[jfp8.TrainState, dict[str, jax.Array]]:
    """Take one step towards the probabilities of the teacher, which is not quantized."""
    tokens = windows[:, :-1]
    targets = jax.nn.softmax(teacher.apply_fn(teacher.variables, tokens))

    def loss_fn(variables, tokens):
        logits = student.apply_fn(variables, tokens)
        return optax.softmax_cross_entropy(logits, targets).mean(), {}

    loss, grads = jfp8.value_and_grad(loss_fn)(student, tokens)
    return student.apply_gradients(grads), {"loss": loss}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    args, text, validation = options.parse(make_parser(), argv, corpus.load)
    recipe = jfp8.recipes.QuantizationAware(args.weights, args.activations, args.backward)
    print(recipe)
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    loss_of = lambda state: training.validation_loss(state, validation)

    tx = training.make_optimizer(args.teacher_lr, args.teacher_steps)
    teacher = training.make_state(make_model(args, None), tx, args.seed, batch_at(0)[:, :-1])
    steps = {"f32": training.train_step}
    states, _ = training.train(steps, {"f32": teacher}, batch_at, args.teacher_steps)
    teacher = states["f32"]

    student = jfp8.TrainState.create(
        apply_fn=make_model(args, recipe).apply,
        variables=teacher.variables,
        tx=training.make_optimizer(args.lr, args.steps),
    )
    later = lambda step: batch_at(args.teacher_steps + step)
    steps = {"qat": partial(distill, teacher)}
    states, numbers = training.train(steps, {"qat": student}, later, args.steps)

    def deployed(params: Any) -> jfp8.TrainState:
        stored = jfp8.quantize_params(params, recipe, exempt="head")
        return student.replace(params=stored)

    losses = {"qat": loss_of(deployed(states["qat"].params)), "f32": loss_of(teacher)}
    rounded = loss_of(deployed(teacher.params))
    trained = loss_of(states["qat"])
    print(f"the student as it was trained {trained:.6f}, as it is deployed {losses['qat']:.6f}")
    print(f"the teacher, rounded after training: {rounded:.4f}")
    labels = {"qat": f"{args.weights}, distilled"}
    more = {"rounded": rounded, "trained": trained}
    title = f"Quantization-aware distillation on {text.name}"
    return report.finish("quantization_aware", title, args, labels, numbers, losses, **more)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
