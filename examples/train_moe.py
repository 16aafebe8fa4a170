"""Train a mixture of experts in FP8, next to the same one in float32, on a CPU in two minutes.

    python examples/train_moe.py --compare

In every block of this Transformer each byte goes through two out of eight experts
(`jfp8.linen.MoE`), which a router chooses. Experts and attention's projections compute in FP8, the
router in float32. A load-balancing loss keeps all experts in use: the picture in `runs/train_moe`
shows the losses, and the share of the bytes of each expert. The text is the source code of
Python's standard library. More to try:

    train_moe.py --compare --balance 0                     # experts may remain unused
    train_moe.py --compare --experts 16 --experts-per-token 4
    train_moe.py --compare --recipe mxfp8                  # another recipe
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm import expert_load, options, report, training
from lm.moe_model import MoETransformer, apply_and_watch

import jfp8

AT_THE_END = 50  # steps: expert statistics are means over the last ones


def make_parser() -> argparse.ArgumentParser:
    files = "metrics.jsonl, loss.png and result.json"
    parser = options.lm_parser("train_moe.py", __doc__, steps=400, files=files)
    options.add_recipe(parser)
    options.add_loss(parser)
    # fmt: off
    group = parser.add_argument_group("experts")
    group.add_argument("--experts", type=options.positive_int, default=8,
                       help="in each block (%(default)s)")
    group.add_argument("--experts-per-token", type=options.positive_int, default=2, metavar="K",
                       help="that each byte goes through (%(default)s)")
    group.add_argument("--intermediate", type=options.positive_int, default=128,
                       help="features inside an expert (%(default)s)")
    group.add_argument("--balance", type=options.natural_float, default=0.01,
                       help="times the load-balancing loss of each block, is added (%(default)s)")
    # fmt: on
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    options.check_compare(parser, args)
    if args.experts_per_token > args.experts:
        parser.error(
            f"--experts-per-token {args.experts_per_token} is more than there are: type "
            f"--experts-per-token {args.experts} or less, or more --experts than {args.experts}"
        )


def make_state(args: argparse.Namespace, run: str) -> jfp8.TrainState:
    """Create a state; one key gives the FP8 and the float32 model the same parameters."""
    model = MoETransformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        experts=args.experts,
        experts_per_token=args.experts_per_token,
        intermediate=args.intermediate,
        recipe=None if run == "f32" else jfp8.recipes.get(args.recipe),
    )
    tx = training.make_optimizer(args.lr, args.steps, multiplier=args.loss_multiplier)
    tx = jfp8.loss_scale(tx) if args.loss_scale else tx
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    return training.make_state(model, tx, args.seed, tokens)


@partial(jax.jit, static_argnames=("balance", "multiplier"), donate_argnums=0)
def train_step(
    state: jfp8.TrainState, batch: jax.Array, *, balance: float, multiplier: float = 1.0
) -> tuple[jfp8.TrainState, dict[str, jax.Array]]:
    """Take one step on ``cross entropy + balance * (sum of the layers' load-balancing losses)``."""

    def loss_fn(variables, windows):
        logits, experts = apply_and_watch(state.apply_fn, variables, windows[:, :-1])
        loss = training.next_byte_loss(logits, windows)
        total = multiplier * (loss + balance * experts.balance.sum())
        return total, {}, {"loss": loss, **experts._asdict()}

    (_, numbers), grads = jfp8.value_and_grad(loss_fn, has_aux=True)(state, batch)
    return state.apply_gradients(grads), numbers


def at_the_end(numbers: report.Numbers) -> dict[str, float]:
    """Return each run's load-balancing loss, and shares of the busiest and the idlest expert."""
    told = {}
    for run, of_run in numbers.items():
        last = of_run[-AT_THE_END:]
        share = expert_load.shares(last).mean(axis=0)
        told[f"{run}_balance"] = float(np.mean([n["balance"] for n in last]))
        told[f"{run}_smallest_share_percent"] = float(share.min())
        told[f"{run}_largest_share_percent"] = float(share.max())
    return told


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    parser = make_parser()
    args, text, validation = options.parse(parser, argv, check=check)
    labels = {"f32": "float32"} if args.recipe == "none" else {"fp8": f"FP8, {args.recipe}"}
    if args.compare:
        labels["f32"] = "float32"
    states = {run: make_state(args, run) for run in labels}
    params = next(iter(states.values())).params
    count = sum(p.size for p in jax.tree.leaves(params))
    idle = 1 - args.experts_per_token / args.experts
    unused = idle * sum(
        params[f"block_{i}"]["moe"][name]["kernel"].size
        for i in range(args.layers)
        for name in ("wi", "wo")
    )
    print(f"model: {count:,} parameters, of which a byte uses {count - round(unused):,}")

    step = partial(train_step, balance=args.balance, multiplier=args.loss_multiplier)
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    states, numbers = training.train(dict.fromkeys(labels, step), states, batch_at, args.steps)
    report.Metrics(Path(args.out) / "metrics.jsonl", []).append(1, numbers)
    losses = {run: training.validation_loss(state, validation) for run, state in states.items()}

    told = at_the_end(numbers)
    for run, label in labels.items():
        low, high = (told[f"{run}_{which}_share_percent"] for which in ("smallest", "largest"))
        print(
            f"experts, {label}: {low:.1f} to {high:.1f} % of a layer's tokens, "
            f"{100 / args.experts:g} % if even; load-balancing loss {told[f'{run}_balance']:.3f}, "
            "1 if even"
        )
    title = f"Mixture of {args.experts} experts, {args.experts_per_token} for each byte"
    picture = partial(expert_load.draw, numbers)
    return report.finish("train_moe", title, args, labels, numbers, losses, picture=picture, **told)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
