"""Time the training step of a plain Flax language model, converted against unconverted.

The model is from examples/train_lm.py with Flax's own layers. All variants run interleaved in
one process; the figures are medians, and ratios to the unconverted f32 step of the same run.

    python benchmarks/converted_lm.py --repeats 15
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

RECIPES = ("delayed", "current")


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of predicting each byte from the bytes before it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.mean(losses)


def plain_step(model, variables, tx, tokens):
    """Return the step without this library."""

    @jax.jit
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(
            lambda params: cross_entropy(model.apply({"params": params}, tokens), tokens)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = variables["params"]
    return functools.partial(step, params, tx.init(params), tokens)


def fp8_step(model, variables, tx, tokens):
    """Return the same step, which also updates the FP8 state."""
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    @jax.jit
    def step(state, tokens):
        loss, grads = jfp8.value_and_grad(
            lambda variables, tokens: (cross_entropy(model.apply(variables, tokens), tokens), {})
        )(state, tokens)
        return state.apply_gradients(grads), loss

    return functools.partial(step, state, tokens)


def measure(width: int, repeats: int) -> dict[str, object]:
    """Return median milliseconds and ratios of every variant."""
    model, tx = Transformer(width=width), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(0), (8, 128), 0, VOCABULARY)
    runs = {
        "unconverted": plain_step(model, model.init(jax.random.key(1), tokens), tx, tokens),
    }
    for name in RECIPES:
        converted = jfp8.convert(model, jfp8.recipes.get(name))
        variables = converted.init(jax.random.key(1), tokens)
        runs[name] = fp8_step(converted, variables, tx, tokens)
    median = interleaved_medians(runs, repeats)
    return {
        name: {"ms": round(ms, 3), "ratio_to_unconverted": round(ms / median["unconverted"], 3)}
        for name, ms in median.items()
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="features of the model")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved runs per variant")
    arguments = parser.parse_args()
    results = measure(arguments.width, arguments.repeats)
    print(
        json.dumps(
            {
                "benchmark": "training step of a converted language model",
                "width": arguments.width,
                "repeats": arguments.repeats,
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
