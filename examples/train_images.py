"""Train a small ResNet in FP8, beside the same model in float32, on a CPU in a minute.

    python examples/train_images.py --compare

The images are Fashion-MNIST if Debian's package dataset-fashion-mnist is installed, and
scikit-learn's digits if not; nothing is downloaded. The eight convolutions of the blocks compute in
FP8, as products over image patches. More to try:

    train_images.py --compare --recipe unscaled --loss-multiplier 1e-3               # fails,
    train_images.py --compare --recipe unscaled --loss-multiplier 1e-3 --loss-scale  # and works
    train_images.py --compare --data ~/kmnist                                        # your own
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from images import data
from images.model import ResNet
from lm.options import RECIPES, natural_int, positive_float, positive_int

import jfp8

BATCH_SIZE = 64
TEST_BATCH_SIZE = 500
STEPS_PER_LINE = 100


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_images.py",
        description="Train a small ResNet in FP8 on Fashion-MNIST or scikit-learn's digits. "
        "With --compare, train the same model in float32 beside it.",
    )
    # fmt: off
    parser.add_argument("--recipe", choices=RECIPES, default="delayed",
                        help="where FP8 scales come from; none is float32 (%(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="train in float32 as well, from the same seed and on the same batches")
    parser.add_argument("--data", metavar="PATH",
                        help="a folder with the four IDX files of MNIST or its kin")
    parser.add_argument("--steps", type=positive_int, default=600, help="(%(default)s)")
    parser.add_argument("--lr", type=positive_float, default=4e-3,
                        help="at its peak (%(default)s)")
    parser.add_argument("--seed", type=natural_int, default=0, help="(%(default)s)")
    parser.add_argument("--loss-scale", action="store_true", help="wrap AdamW with jfp8.loss_scale")
    parser.add_argument("--loss-multiplier", type=positive_float, default=1.0, metavar="M",
                        help="differentiate M * loss: AdamW does not mind, unscaled FP8 does (1)")
    parser.add_argument("--out", metavar="DIR", default="runs/train_images",
                        help="for result.json (%(default)s)")
    # fmt: on
    return parser


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW, one cycle. Its eps is the size of a gradient, which a multiplied loss multiplies."""
    schedule = optax.cosine_onecycle_schedule(args.steps, args.lr)
    tx = optax.adamw(schedule, eps=1e-8 * args.loss_multiplier)
    return jfp8.loss_scale(tx) if args.loss_scale else tx


def make_state(args: argparse.Namespace, run: str, images: np.ndarray) -> jfp8.TrainState:
    """The same key gives the FP8 model and the float32 model the same initial parameters."""
    model = ResNet(recipe=jfp8.recipes.get(args.recipe) if run == "fp8" else None)
    variables = jax.jit(functools.partial(model.init, train=True))(
        jax.random.key(args.seed), images
    )
    return jfp8.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=make_optimizer(args)
    )


@functools.partial(jax.jit, static_argnames="multiplier", donate_argnums=0)
def train_step(
    state: jfp8.TrainState, batch: data.Batch, *, multiplier: float
) -> tuple[jfp8.TrainState, jax.Array]:
    def loss_fn(variables, batch):
        images, classes = batch
        logits, mutated = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
        return multiplier * losses.mean(), mutated

    loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
    return state.apply_gradients(grads), loss / multiplier


@jax.jit
def _sums(state: jfp8.TrainState, batch: data.Batch) -> tuple[jax.Array, jax.Array]:
    images, classes = batch
    logits = state.apply_fn(state.variables, images, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
    return losses.sum(), (logits.argmax(axis=-1) == classes).sum()


def evaluate(state: jfp8.TrainState, images: data.Images) -> tuple[float, float]:
    """Mean cross-entropy in nats, and accuracy in percent, over all test images."""
    sums = [jax.device_get(_sums(state, b)) for b in images.test_batches(TEST_BATCH_SIZE)]
    loss, correct = np.sum(sums, axis=0, dtype=np.float64) / len(images.test[0])
    return float(loss), 100 * float(correct)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Returns what `result.json` holds."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.compare and args.recipe == "none":
        parser.error(
            "--compare with --recipe none would train float32 twice: leave --compare out, or name "
            "an FP8 recipe, for example --recipe delayed"
        )
    out = Path(args.out)
    try:
        images = data.load(args.data)
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    labels = {"f32": "float32"} if args.recipe == "none" else {"fp8": f"FP8, {args.recipe}"}
    if args.compare:
        labels["f32"] = "float32"
    first_images, _ = images.train_batch(args.seed, 0, BATCH_SIZE)
    states = {run: make_state(args, run, first_images) for run in labels}
    parameters = sum(p.size for p in jax.tree.leaves(next(iter(states.values())).params))
    counts = [len(classes) for _, classes in (images.train, images.test)]
    print(f"images: {images.name}, {counts[0]:,} to train on and {counts[1]:,} to test")
    print(f"model: {parameters:,} parameters; training in {' and in '.join(labels.values())}")

    losses = {run: [] for run in labels}
    ms = {run: [] for run in labels}
    for step in range(args.steps):
        batch = images.train_batch(args.seed, step, BATCH_SIZE)
        for run in labels:
            start = time.perf_counter()
            states[run], loss = train_step(states[run], batch, multiplier=args.loss_multiplier)
            losses[run].append(float(loss))
            ms[run].append(1000 * (time.perf_counter() - start))
        if (step + 1) % STEPS_PER_LINE == 0:
            means = (f"{run} {np.mean(losses[run][-STEPS_PER_LINE:]):.4f}" for run in labels)
            print(f"steps {step + 2 - STEPS_PER_LINE:3} to {step + 1:3}, mean loss:", *means)

    tested = {run: evaluate(state, images) for run, state in states.items()}
    result = {
        "data": images.name,
        "test_loss": {run: loss for run, (loss, _) in tested.items()},
        "test_accuracy": {run: accuracy for run, (_, accuracy) in tested.items()},
        "parameters": parameters,
        "ms_per_step": {run: round(float(np.median(ms[run])), 2) for run in labels},
        "device": jax.devices()[0].device_kind,
        "versions": {m.__name__: m.__version__ for m in (jfp8, jax, flax, optax)},
        "arguments": vars(args),
        "train_loss": losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")

    print("test loss and accuracy")
    for run, label in labels.items():
        loss, accuracy = tested[run]
        speed = f"{result['ms_per_step'][run]:.0f} ms per step"
        print(f"  {label:16} {loss:.4f}   {accuracy:.2f} %   {speed}")
    if args.compare:
        gap = 100 * (tested["fp8"][0] / tested["f32"][0] - 1)
        points = tested["fp8"][1] - tested["f32"][1]
        print(f"  gap              {gap:+.2f} %  {points:+.2f} points")
    print(f"written to {out / 'result.json'}")
    return result


if __name__ == "__main__":
    main()
