"""Time a Dense layer, forward and backward, in FP8 against Flax's own; print JSON.

All variants run interleaved in one process, so that changes of clock or load affect all alike; the
figures are medians, and ratios to a baseline of the same run.

    python benchmarks/dense.py --size 1024 --repeats 41
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from common import environment, interleaved_medians

import jfp8


def forward_backward(layer: nn.Module, x: jax.Array, variables):
    """Return a jitted call: the output's inner product with an array, and its gradients.

    That array is an argument, or XLA would quantize it at compile time; and the value is returned,
    or XLA would drop the forward product.
    """
    # Flax's FP8 op hands out new state as gradients, so its state is differentiated, too.
    constant = {k: v for k, v in variables.items() if k == "fp8"}
    differentiated = {k: v for k, v in variables.items() if k != "fp8"}
    target = jax.random.normal(jax.random.key(9), (x.shape[0], layer.features), x.dtype)

    @jax.jit
    def step(differentiated, constant, x, target):
        def loss(differentiated, x):
            return jnp.vdot(layer.apply({**differentiated, **constant}, x), target)

        return jax.value_and_grad(loss, argnums=(0, 1))(differentiated, x)

    return functools.partial(step, differentiated, constant, x, target)


RECIPES = {
    jnp.float32: {recipe.name: recipe() for recipe in jfp8.recipes.RECIPES},
    jnp.bfloat16: {name: jfp8.recipes.get(name) for name in ("delayed", "current")},
}


def measure(size: int, repeats: int, seed: int = 0) -> dict[str, object]:
    """Return median milliseconds and ratios of every variant at batch = in = out = `size`."""
    runs = {}
    for dtype, recipes in RECIPES.items():
        name = np.dtype(dtype).name
        x = jax.random.normal(jax.random.key(seed), (size, size), dtype)
        layers = {
            "nn.Dense": nn.Dense(size, dtype=dtype),
            "flax nn.Fp8DotGeneral": nn.Dense(size, dtype=dtype, dot_general_cls=nn.Fp8DotGeneral),
        }
        for recipe_name, recipe in recipes.items():
            layers[f"jfp8.Dense {recipe_name}"] = jfp8.Dense(size, dtype=dtype, recipe=recipe)
        for layer_name, layer in layers.items():
            variables = layer.init(jax.random.key(1), x)
            runs[name, layer_name] = forward_backward(layer, x, variables)

    median = interleaved_medians(runs, repeats)
    return {
        f"{dtype} {name}": {
            "ms": round(ms, 3),
            "ratio_to_nn.Dense": round(ms / median[dtype, "nn.Dense"], 3),
            "ratio_to_flax_fp8": round(ms / median[dtype, "flax nn.Fp8DotGeneral"], 3),
        }
        for (dtype, name), ms in median.items()
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="batch, input and output features")
    parser.add_argument("--repeats", type=int, default=41, help="interleaved runs per variant")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax's op warns about its own deprecation
        results = measure(arguments.size, arguments.repeats)
    print(
        json.dumps(
            {
                "benchmark": "dense forward + backward",
                "size": arguments.size,
                "repeats": arguments.repeats,
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
