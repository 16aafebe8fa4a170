"""A custom recipe: write it, inspect its matmuls, train with it, in a minute.

    python examples/custom_recipe.py

Four bits forward, eight backward, one scale per tensor. A format of four bits has eight magnitudes,
and a scale from the largest value of a tensor would waste most of them. So `FourBits` lets values
beyond `sigmas` times the root mean square saturate. It trains a language model on the source code
of Python's standard library, next to the same recipe with scales from the largest value (`stock`)
and next to float32, from the same seed. More to try:

    custom_recipe.py --sigmas 2.5         # another threshold
    custom_recipe.py --data ~/my_book.txt # your own text
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from lm import options, report, training
from lm.model import Transformer

import jfp8
from jfp8.quantizers import Context, Current, Quantizer
from jfp8.recipes import Product, Products, Recipe


@dataclass(frozen=True)
class Saturating(Quantizer):
    """Quantize by ``scale = sigmas * rms(x) / fmt.max``, or the scale of `Current` if smaller."""

    sigmas: float = 3.0

    @property
    def one_for_both(self) -> bool:
        return True  # one scale for all, whichever dimensions are contracted: quantize once

    def __call__(self, x: jax.Array, context: Context) -> jfp8.ScaledArray:
        rms = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
        largest = jnp.minimum(self.sigmas * rms, context.amax)
        largest = jnp.where(jnp.isfinite(context.amax), largest, context.amax)
        return self.data_for(x, jfp8.scaling.scale_from_amax(largest, self.fmt), context)


@dataclass(frozen=True)
class FourBits(Recipe):
    """Compute y = q(x) q(w) in e2m1; dx = q8(dy) q(w) and dw = q(x) q8(dy) with dy in e5m2."""

    name: ClassVar[str] = "four_bits"

    sigmas: float | None = 3.0

    def products(self) -> Products:
        q = Current(jfp8.E2M1FN)
        if self.sigmas is not None:
            q = Saturating(jfp8.E2M1FN, self.sigmas)
        grad = Current(jfp8.E5M2)
        return Products(fprop=Product(q, q), dgrad=Product(grad, q), wgrad=Product(q, grad))


def make_parser() -> argparse.ArgumentParser:
    parser = options.lm_parser("custom_recipe.py", __doc__, steps=150)
    # fmt: off
    parser.add_argument("--sigmas", type=options.positive_float, default=3.0,
                        help="values beyond this many times the root mean square saturate "
                        "(%(default)s)")
    # fmt: on
    return parser


def product_error(recipe: Recipe) -> float:
    """Return the relative error of a matmul of normal operands with a few outliers, in percent."""
    x = jax.random.normal(jax.random.key(0), (256, 512)).at[0, 0].set(20.0)
    w = jax.random.normal(jax.random.key(1), (512, 128))
    y = jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe)
    exact = jnp.matmul(x, w, precision="highest")
    return float(100 * jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    args, text, validation = options.parse(make_parser(), argv)
    recipes = {"own": FourBits(args.sigmas), "stock": FourBits(None), "f32": None}
    labels = {
        "own": f"four bits, {args.sigmas:g} sigmas",
        "stock": "four bits, largest value",
        "f32": "float32",
    }
    print("error of one matmul whose first operand has an outlier:")
    errors = {run: product_error(recipe) for run, recipe in recipes.items() if recipe is not None}
    for run, error in errors.items():
        print(f"  {labels[run]:24} {error:.1f} %")
    read = jfp8.recipes.from_json(recipes["own"].to_json(), known=[FourBits])
    print(f"as JSON: {read.to_json()}")

    states = {}
    for run, recipe in recipes.items():
        model = Transformer(args.width, args.layers, args.heads, args.seq_len, recipe)
        tx = training.make_optimizer(args.lr, args.steps)
        tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
        states[run] = training.make_state(model, tx, args.seed, tokens)
    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    steps = dict.fromkeys(states, training.train_step)
    states, numbers = training.train(steps, states, batch_at, args.steps)
    losses = {run: training.validation_loss(state, validation) for run, state in states.items()}
    title = "Four bits forward, one scale per tensor"
    more = {"stock_gap_percent": report.relative_gap(losses, "stock"), "sigmas": args.sigmas}
    more |= {f"{run}_product_error_percent": error for run, error in errors.items()}
    return report.finish("custom_recipe", title, args, labels, numbers, losses, **more)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
