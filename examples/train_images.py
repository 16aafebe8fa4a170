"""Train a small ResNet in FP8, next to the same model in float32, on a CPU in a minute or two.

    python examples/train_images.py --compare

The images are Fashion-MNIST if Debian's package dataset-fashion-mnist is installed, and
scikit-learn's digits if not; nothing is downloaded. The eight convolutions of the blocks compute in
FP8, as matmuls over image patches. More to try:

    train_images.py --compare --recipe unscaled --loss-multiplier 1e-3               # fails,
    train_images.py --compare --recipe unscaled --loss-multiplier 1e-3 --loss-scale  # and works
    train_images.py --compare --data ~/kmnist                                        # your own
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from images import data
from images.model import ResNet
from lm import report, training
from lm.options import RECIPES, natural_int, parser_of, positive_float, positive_int

import jfp8

BATCH_SIZE = 64
TEST_BATCH_SIZE = 500


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of("train_images.py", __doc__)
    # fmt: off
    parser.add_argument("--recipe", choices=RECIPES, default="delayed",
                        help="where FP8 scales come from; none is float32 (%(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="train in float32 as well, from the same seed and on the same batches")
    parser.add_argument("--data", metavar="PATH",
                        help="a folder with the four IDX files of MNIST or a similar data set")
    parser.add_argument("--steps", type=positive_int, default=600, help="(%(default)s)")
    parser.add_argument("--lr", type=positive_float, default=4e-3,
                        help="at its peak (%(default)s)")
    parser.add_argument("--seed", type=natural_int, default=0, help="(%(default)s)")
    parser.add_argument("--loss-scale", action="store_true", help="wrap AdamW with jfp8.loss_scale")
    parser.add_argument("--loss-multiplier", type=positive_float, default=1.0, metavar="M",
                        help="differentiate M * loss: AdamW does not mind, unscaled FP8 does (1)")
    parser.add_argument("--out", metavar="DIR", default="runs/train_images",
                        help="for loss.png and result.json (%(default)s)")
    # fmt: on
    return parser


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Create AdamW, one cycle. Its eps scales with gradients, hence with the multiplied loss."""
    schedule = optax.cosine_onecycle_schedule(args.steps, args.lr)
    tx = optax.adamw(schedule, eps=1e-8 * args.loss_multiplier)
    return jfp8.loss_scale(tx) if args.loss_scale else tx


def make_state(args: argparse.Namespace, run: str, images: np.ndarray) -> jfp8.TrainState:
    """Create a state; one key gives the FP8 and the float32 model the same parameters."""
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
    """Return mean cross-entropy in nats, and accuracy in percent, over all test images."""
    sums = [jax.device_get(_sums(state, b)) for b in images.test_batches(TEST_BATCH_SIZE)]
    loss, correct = np.sum(sums, axis=0, dtype=np.float64) / len(images.test[0])
    return float(loss), 100 * float(correct)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.compare and args.recipe == "none":
        parser.error(
            "--compare with --recipe none would train float32 twice: omit --compare, or name "
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

    def step(state: jfp8.TrainState, batch: data.Batch) -> tuple[jfp8.TrainState, Any]:
        state, loss = train_step(state, batch, multiplier=args.loss_multiplier)
        return state, {"loss": loss}

    batch_at = lambda i: images.train_batch(args.seed, i, BATCH_SIZE)
    steps = dict.fromkeys(labels, step)
    states, numbers = training.train(steps, states, batch_at, args.steps)
    losses = {run: [n["loss"] for n in of_run] for run, of_run in numbers.items()}
    ms = report.median_ms(numbers)

    tested = {run: evaluate(state, images) for run, state in states.items()}
    ends = {run: loss for run, (loss, _) in tested.items()}
    result = {
        "data": images.name,
        "test_loss": {run: tested[run][0] for run in labels},
        "test_accuracy": {run: tested[run][1] for run in labels},
        "noise_percent": report.relative_gap(ends, report.AGAIN),
        "parameters": parameters,
        "ms_per_step": {run: round(ms[run], 2) for run in labels},
        **report.environment(),
        "arguments": vars(args),
        "train_loss": losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")

    losses_at_end, accuracy = result["test_loss"], result["test_accuracy"]
    legend = {r: f"{labels[r]}: test accuracy {accuracy[r]:.2f} %" for r in labels}
    title = report.headline(f"Small ResNet on {images.name}", losses_at_end)
    report.draw(out / "loss.png", losses, labels, title, legend, unit="nats per image")
    column = {run: f"{accuracy[run]:.2f} %" for run in labels}
    print(report.table(labels, ends, result["ms_per_step"], "test loss", accuracy=column))
    if args.compare:
        points = accuracy["fp8"] - accuracy["f32"]
        again = tested[report.AGAIN][1] - accuracy["f32"]
        print(f"  accuracy relative to float32: {points:+.2f} points; float32 again {again:+.2f}")
    print(f"written to {out}: loss.png, result.json")
    figures = {f"{run}_accuracy": accuracy[run] for run in labels}
    figures |= {
        "noise_percent": result["noise_percent"],
        "data": images.name,
        "steps": args.steps,
        "seed": args.seed,
    }
    gap = report.relative_gap(losses_at_end)
    print(
        report.result_line(
            "train_images", metric="test_loss", **losses_at_end, gap_percent=gap, **figures
        )
    )
    return result


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
