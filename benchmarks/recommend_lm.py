"""Print the layers of the example's language model that `jfp8.debug.recommend` keeps in 8 bits.

The model trains in float32 for some steps, from a seed that `parity.py` does not use. Then a few
steps collect statistics, under NVFP4 and under MX. `parity.py` trains the proposal, as
"recommended", next to a naive one with the same share of FLOPs in 8 bits: the first of the
four layers of every block.

    python benchmarks/recommend_lm.py --share 0.75

With `--held-out` the proposal is judged on models that it was not made from, of other sizes, seeds
and batches: by the noise that its roundings add to the gradient, next to choices of about the same
share that follow a pattern.

    noise = |g' - g|^2 / |g|^2      g of float32, summed over all parameters and batches
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jfp8

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_lm
from lm import corpus, options, training

MEASURED = 4  # steps with statistics
HELD_OUT = [
    ["--seed", "1", "--steps", "150"],
    ["--seed", "2", "--steps", "150", "--width", "96"],
    ["--seed", "3", "--steps", "300"],
]


def recommend(args: argparse.Namespace, share: float) -> jfp8.debug.Recommendation:
    """Return the proposal for the model after `args.steps` steps."""
    text = corpus.load(args.data, args.seq_len)
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    state = train_lm.make_state(args, "f32")
    for step in range(args.steps):
        state, _ = training.train_step(state, batch_at(step))

    rows, plain = [], train_lm.make_model(args, "f32")
    for recipe in ("nvfp4", "mxfp8"):
        model = jfp8.convert(plain, recipe, exempt=("head",))

        @jax.jit
        @jfp8.debug.stats
        @jax.grad
        def gradients(params, windows, model=model):
            logits = model.apply({"params": params}, windows[:, :-1])
            return training.next_byte_loss(logits, windows)

        for step in range(args.steps, args.steps + MEASURED):
            rows += gradients(state.params, batch_at(step))[1].rows(step)
    narrow = jfp8.convert(plain, "nvfp4", exempt=("head",))
    products = jfp8.report(narrow, {"params": state.params}, batch_at(0)[:, :-1])
    return jfp8.debug.recommend(rows, products, share=share)


PATTERNS = {
    "nothing": {},
    "every qkv": {"*/qkv": "mxfp8"},
    "the first block": {"block_0/*": "mxfp8"},
    "the last block": {"block_3/*": "mxfp8"},
    "every other up and out": {"block_[02]/up": "mxfp8", "*/out": "mxfp8"},
}


def noise(args: argparse.Namespace, choices: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the noise of NVFP4 with each choice, after `args.steps` float32 steps; in percent."""
    text = corpus.load(args.data, args.seq_len)
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    state, plain = train_lm.make_state(args, "f32"), train_lm.make_model(args, "f32")
    for step in range(args.steps):
        state, _ = training.train_step(state, batch_at(step))

    def gradients(model):
        @jax.jit
        @jax.grad
        def of_params(params, windows):
            logits = model.apply({"params": params}, windows[:, :-1])
            return training.next_byte_loss(logits, windows)

        return [of_params(state.params, batch_at(args.steps + i)) for i in range(MEASURED)]

    exact = gradients(plain)
    squares = lambda tree: sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree))
    found = {}
    for name, choice in choices.items():
        rounded = gradients(jfp8.convert(plain, {**choice, "*": "nvfp4"}, exempt=("head",)))
        found[name] = 100 * squares(jax.tree.map(jnp.subtract, rounded, exact)) / squares(exact)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.75, help="of the FLOPs in 4 bits")
    parser.add_argument("--steps", type=int, default=150, help="before statistics are taken")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--held-out", action="store_true", help="judge it on other models, too")
    given = parser.parse_args()
    example = ["--recipe", "none", "--seed", str(given.seed), "--steps", str(given.steps)]
    parse = options.make_parser().parse_args
    found = recommend(parse(example), given.share)
    print(found)
    if given.held_out:
        proposed = {path: recipe for path, recipe in found.recipes.items() if path != "*"}
        choices = {**PATTERNS, "as proposed": proposed}
        columns = [noise(parse(["--recipe", "none", *more]), choices) for more in HELD_OUT]
        print("\n| in mxfp8 |", " | ".join(map(" ".join, HELD_OUT)), "|\n" + "|---" * 4 + "|")
        for name in choices:
            print(f"| {name} |", " | ".join(f"{column[name]:.2f} %" for column in columns), "|")


if __name__ == "__main__":
    main()
