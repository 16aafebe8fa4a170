"""Which layers of the example's language model `jfp8.debug.recommend` keeps in 8 bits; print them.

The model trains in float32 for some steps, from a seed that `parity.py` does not use. Then a few
steps from there have statistics, under NVFP4 and under MX. `parity.py` trains the proposal, as
"recommended", beside one with the same part of the FLOPs in 8 bits and no thought: the first of the
four layers of every block.

    python benchmarks/recommend_lm.py --share 0.75
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

import jfp8

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_lm
from lm import corpus, options, training

MEASURED = 4  # steps with statistics


def recommend(args: argparse.Namespace, share: float) -> jfp8.debug.Recommendation:
    """What is proposed for the model after `args.steps` steps."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.75, help="of the FLOPs in 4 bits")
    parser.add_argument("--steps", type=int, default=150, help="before statistics are taken")
    parser.add_argument("--seed", type=int, default=99)
    given = parser.parse_args()
    example = ["--recipe", "none", "--seed", str(given.seed), "--steps", str(given.steps)]
    print(recommend(options.make_parser().parse_args(example), given.share))


if __name__ == "__main__":
    main()
