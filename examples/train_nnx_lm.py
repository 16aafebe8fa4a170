"""Train a Flax NNX language model in FP8, next to the same model in float32, in a minute.

    python examples/train_nnx_lm.py

The model (`lm/nnx_model.py`) uses `jfp8.nnx.Linear` instead of `nnx.Linear`; the loop uses
`jfp8.nnx.value_and_grad` instead of `nnx.value_and_grad`, and `jfp8.nnx.Optimizer`, which skips a
step that is not finite. Nothing else differs: the step is under `nnx.jit`, and amax histories are
Variables of the model, with their own type. The text is the source code of Python's standard
library.
More to try:

    train_nnx_lm.py --recipe current      # scales from each tensor itself: no histories
    train_nnx_lm.py --stock-gradient      # nnx.value_and_grad: gradients without histories
    train_nnx_lm.py --data ~/my_book.txt  # your own text

Or train a larger model (`lm/llama_nnx.py`) by itself, on several devices: on 8 GPUs, and with a
small size on 8 virtual devices of a CPU:

    train_nnx_lm.py --size 1b --devices 8 --steps 5000 --checkpoint-every 500
    train_nnx_lm.py --size tiny --devices 8 --steps 60 --checkpoint-every 20
    train_nnx_lm.py --size tiny --devices 8 --steps 60 --resume     # after it was stopped
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from lm import options, report, run_nnx, training
from lm.nnx_model import Transformer

import jfp8

State = tuple[Transformer, jfp8.nnx.Optimizer]


def make_parser() -> argparse.ArgumentParser:
    parser = options.lm_parser("train_nnx_lm.py", __doc__, steps=200)
    # fmt: off
    parser.add_argument("--recipe", choices=options.RECIPES, default="delayed",
                        help="where FP8 scales come from; none, with --size: bf16 (%(default)s)")
    parser.add_argument("--stock-gradient", action="store_true",
                        help="nnx.value_and_grad in FP8 too, which records no amax of a gradient")
    # fmt: on
    run_nnx.add_options(parser)
    return parser


def make_state(args: argparse.Namespace, recipe: Any) -> State:
    """Create a state; one seed gives an FP8 model and its float32 twin the same parameters."""
    model = Transformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        recipe=recipe,
        rngs=nnx.Rngs(args.seed),
    )
    tx = training.make_optimizer(args.lr, args.steps)
    return model, jfp8.nnx.Optimizer(model, tx)


def loss_fn(model: Transformer, windows: jax.Array) -> jax.Array:
    return training.next_byte_loss(model(windows[:, :-1]), windows)


def make_step(value_and_grad: Callable[..., Any]) -> training.Step:
    """Create a step as in any NNX loop, which changes the model and the optimizer in place."""

    @nnx.jit
    def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, grads = value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    def step(state: State, batch: np.ndarray) -> tuple[State, dict[str, jax.Array]]:
        return state, {"loss": train_step(*state, batch)}

    return step


_validation_loss = nnx.jit(loss_fn)


def validation_loss(model: Transformer, batches: np.ndarray) -> float:
    """Return the mean loss of `batches`."""
    return float(np.mean([_validation_loss(model, batch) for batch in batches], dtype=np.float64))


def is_delayed(node: Any) -> bool:
    """Return True if `node` is an FP8 matmul with histories of amaxes."""
    return isinstance(node, jfp8.nnx.Product) and node.fp8 is not None


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    parser = make_parser()
    if size := parser.parse_known_args(argv)[0].size:
        parser.set_defaults(**run_nnx.defaults(size))
    args, text, validation = options.parse(parser, argv, check=run_nnx.check)
    if args.size:
        numbers, losses = run_nnx.train(args, text, validation)
        labels = {args.recipe: f"{args.size}, {args.recipe} on {args.devices} devices"}
        return report.finish("train_nnx_lm", f"{args.size} in NNX", args, labels, numbers, losses)
    recipes = {"fp8": jfp8.recipes.get(args.recipe), "f32": None}
    labels = {"fp8": f"jfp8.nnx, {args.recipe}", "f32": "flax.nnx, float32"}
    of_fp8 = nnx.value_and_grad if args.stock_gradient else jfp8.nnx.value_and_grad
    steps = {"fp8": make_step(of_fp8), "f32": make_step(nnx.value_and_grad)}
    states = {run: make_state(args, recipe) for run, recipe in recipes.items()}
    params = nnx.state(states["fp8"][0], nnx.Param)
    fp8_state = nnx.state(states["fp8"][0], jfp8.nnx.Fp8State)
    counts = [sum(leaf.size for leaf in jax.tree.leaves(s)) for s in (params, fp8_state)]
    print(f"model: {counts[0]:,} parameters, and {counts[1]:,} numbers of FP8 state")

    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    states, numbers = training.train(steps, states, batch_at, args.steps)
    products = [node for _, node in nnx.iter_graph(states["fp8"][0]) if is_delayed(node)]
    filled = sum(bool(product.histories()["grad"].any()) for product in products)
    skipped = int(states["fp8"][1].skipped_steps[...])
    print(f"{filled} of {len(products)} histories of gradients have entries")
    print(f"{skipped} steps were skipped")
    losses = {run: validation_loss(model, validation) for run, (model, _) in states.items()}
    title = "Byte-level Transformer in Flax NNX"
    more = {"grad_histories": filled}
    return report.finish("train_nnx_lm", title, args, labels, numbers, losses, **more)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    devices = make_parser().parse_known_args()[0].devices or 1
    jax.config.update("jax_num_cpu_devices", devices)  # before JAX looks for devices
    main()
