"""Train a byte-level Transformer in FP8, beside the same model in float32, on a CPU in two minutes.

    python examples/train_lm.py --compare

The text is the source code of Python's own standard library, so nothing is downloaded. The sixteen
dense layers of the blocks compute in FP8. At the end come both validation losses, a picture of both
curves and a summary, in `runs/train_lm`. More to try:

    train_lm.py --compare --recipe unscaled                            # FP8 without scales fails,
    train_lm.py --compare --recipe unscaled --loss-scale               # and a loss scale repairs it
    train_lm.py --checkpoint runs/state.msgpack --checkpoint-every 50  # go on later with --resume
    train_lm.py --compare --data ~/my_book.txt                         # your own text
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

import jfp8

try:
    from lm import report
except ModuleNotFoundError as missing:
    message = f"train_lm.py needs {missing.name}: type  pip install 'jfp8[examples]'"
    raise SystemExit(message) from None
from lm import checkpoint, corpus, options
from lm.model import Transformer

STEPS_PER_SYNC = 10  # the host waits for the device this often, to move the progress bar


def make_model(args: argparse.Namespace, run: str) -> Transformer:
    """The `"fp8"` model or its `"f32"` twin."""
    recipe = jfp8.recipes.get(args.recipe) if run == "fp8" else None
    return Transformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        recipe=recipe,
        head_recipe=recipe if args.fp8_head else None,
    )


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay.

    The clipping threshold and eps are sizes of gradients. A multiplied loss multiplies every
    gradient, so both carry the multiplier too, and AdamW divides it out again.
    """
    warm_up = min(30, args.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, warm_up, args.steps)
    m = args.loss_multiplier
    tx = optax.chain(
        optax.clip_by_global_norm(1.0 * m),
        optax.adamw(schedule, b2=0.98, eps=1e-8 * m, weight_decay=0.05),
    )
    return jfp8.loss_scale(tx) if args.loss_scale else tx


def make_state(args: argparse.Namespace, run: str) -> jfp8.TrainState:
    """The same key gives the FP8 model and the float32 model the same initial parameters."""
    model = make_model(args, run)
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    variables = jax.jit(model.init)(jax.random.key(args.seed), tokens)
    return jfp8.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=make_optimizer(args)
    )


def cross_entropy(state: jfp8.TrainState, variables: Any, windows: jax.Array) -> jax.Array:
    """The mean loss, in nats, of predicting every byte from those before it."""
    logits = state.apply_fn(variables, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@functools.partial(jax.jit, static_argnames=("micro_batches", "multiplier"), donate_argnums=0)
def train_step(
    state: jfp8.TrainState, batch: jax.Array, *, micro_batches: int, multiplier: float
) -> tuple[jfp8.TrainState, dict[str, jax.Array]]:
    def loss_fn(variables, batch):
        return multiplier * cross_entropy(state, variables, batch), {}

    loss, grads = jfp8.value_and_grad(loss_fn, micro_batches=micro_batches)(state, batch)
    state = state.apply_gradients(grads)
    numbers = {"loss": loss / multiplier}
    loss_scale = optax.tree_utils.tree_get(state.opt_state, "loss_scale")
    if loss_scale is not None:
        numbers["loss_scale"] = loss_scale
    return state, numbers


def compile_step(args: argparse.Namespace, state: jfp8.TrainState, batch: np.ndarray) -> Callable:
    """Compiling ahead of the loop keeps the seconds it takes out of the milliseconds per step."""
    return train_step.lower(
        state, batch, micro_batches=args.micro_batches, multiplier=args.loss_multiplier
    ).compile()


def take_steps(
    steps: dict[str, Callable], states: dict[str, jfp8.TrainState], batches: list[np.ndarray]
) -> tuple[dict[str, jfp8.TrainState], dict[str, list[dict[str, float]]]]:
    """One step per batch, of one model and then of the other. The host waits once for each."""
    states, numbers = dict(states), {}
    for run in states:
        start = time.perf_counter()
        pending = []
        for batch in batches:
            states[run], of_step = steps[run](states[run], batch)
            pending.append(of_step)
        numbers[run] = [{k: float(v) for k, v in n.items()} for n in jax.device_get(pending)]
        ms = 1000 * (time.perf_counter() - start) / len(batches)
        for of_step in numbers[run]:
            of_step["ms"] = round(ms, 2)
    return states, numbers


@jax.jit
def _validation_loss(state: jfp8.TrainState, windows: jax.Array) -> jax.Array:
    return cross_entropy(state, state.variables, windows)


def validation_loss(state: jfp8.TrainState, batches: np.ndarray) -> float:
    return float(np.mean([_validation_loss(state, batch) for batch in batches], dtype=np.float64))


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Returns what `result.json` holds; None when --stop-at ended the run before its last step."""
    parser = options.make_parser()
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
    step, lines = 0, []
    if saved is not None:
        step, states, lines = checkpoint.restore(saved, states)
    parameters = sum(p.size for p in jax.tree.leaves(next(iter(states.values())).params))
    print(f"text: {text.periods.size:,} bytes of {text.name}, every 20th block of 4 KiB held out")
    print(f"model: {parameters:,} parameters; training in {' and in '.join(labels.values())}")

    start = time.perf_counter()
    first_batch = text.train_batch(args.seed, 0, args.batch_size)
    steps = {run: compile_step(args, state, first_batch) for run, state in states.items()}
    print(f"compiled in {time.perf_counter() - start:.1f} s")

    metrics = report.Metrics(out / "metrics.jsonl", lines)
    last = min(args.steps, args.stop_at or args.steps)
    save_every = args.checkpoint_every or args.steps
    with report.progress_bar(step, args.steps) as bar:
        while step < last:
            end = min(last, *(step - step % n + n for n in (STEPS_PER_SYNC, save_every)))
            batches = [text.train_batch(args.seed, s, args.batch_size) for s in range(step, end)]
            states, numbers = take_steps(steps, states, batches)
            metrics.append(step + 1, numbers)
            report.advance(bar, end, numbers)
            step = end
            if args.checkpoint and (step % save_every == 0 or step == last):
                checkpoint.save(args.checkpoint, step, states, metrics.lines, config)
    if step < args.steps:
        print(f"stopped after step {step}: to go on, put --resume in place of --stop-at")
        return None

    losses = {run: validation_loss(state, validation) for run, state in states.items()}
    gap = report.relative_gap(losses)
    result = {
        "validation_loss": losses,
        "gap_percent": gap,
        "parameters": parameters,
        "ms_per_step": metrics.median("ms"),
        "device": jax.devices()[0].device_kind,
        "versions": {m.__name__: m.__version__ for m in (jfp8, jax, flax, optax)},
        "arguments": vars(args),
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    report.draw(out / "loss.png", metrics.lines, labels, losses)

    print("validation loss, nats per byte")
    for run, label in labels.items():
        print(f"  {label:16} {losses[run]:.4f}   {result['ms_per_step'][run]:.0f} ms per step")
    if gap is not None:
        print(f"  relative gap     {gap:+.2f} %")
    print(f"written to {out}: metrics.jsonl, loss.png, result.json")
    return result


if __name__ == "__main__":
    main()
