"""Time a training step with statistics of every FP8 tensor against the step without them.

The model is from examples/train_lm.py. Both programs run interleaved in one process; the figures
are medians. With statistics taken every n steps, a step takes (n - 1 + ratio) / n of its time.

    python benchmarks/tensor_stats.py --every 10 --repeats 15
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from common import environment, interleaved_medians

import jfp8

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm.model import VOCABULARY, Transformer

RECIPES = ("delayed", "current", "mxfp8")


def steps(recipe: str, width: int):
    """Return the step, and the same with statistics, of a language model under a recipe."""
    model = jfp8.convert(Transformer(width=width), jfp8.recipes.get(recipe))
    tokens = jax.random.randint(jax.random.key(0), (8, 128), 0, VOCABULARY)
    tx = optax.chain(jfp8.loss_scale(), optax.adamw(1e-3))
    variables = model.init(jax.random.key(1), tokens)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def loss_fn(variables, tokens):
        logits = model.apply(variables, tokens)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), {}

    def step(state, tokens):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, tokens)
        return state.apply_gradients(grads), loss

    without, with_stats = jax.jit(step), jax.jit(jfp8.debug.stats(step))
    return functools.partial(without, state, tokens), functools.partial(with_stats, state, tokens)


def measure(width: int, every: int, repeats: int) -> dict[str, object]:
    """Return median milliseconds with and without, and the average of a step."""
    results = {}
    for recipe in RECIPES:
        without, with_stats = steps(recipe, width)
        median = interleaved_medians({"without": without, "with": with_stats}, repeats)
        ratio = median["with"] / median["without"]
        results[recipe] = {
            "without_ms": round(median["without"], 3),
            "with_ms": round(median["with"], 3),
            "ratio": round(ratio, 3),
            f"ratio_every_{every}_steps": round((every - 1 + ratio) / every, 4),
        }
    return results


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128, help="features of the model")
    parser.add_argument("--every", type=int, default=10, help="steps between two samples")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved runs per variant")
    arguments = parser.parse_args()
    results = measure(arguments.width, arguments.every, arguments.repeats)
    print(
        json.dumps(
            {
                "benchmark": "training step with statistics of every FP8 tensor",
                "width": arguments.width,
                "every": arguments.every,
                "repeats": arguments.repeats,
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
