"""Time a Conv layer, forward and backward, in FP8 against Flax's own; print JSON.

All variants run interleaved in one process; the figures are medians, and ratios to nn.Conv in f32
of the same run.

    python benchmarks/conv.py --repeats 21
"""

from __future__ import annotations

import argparse
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
from common import environment, interleaved_medians

import jfp8

# image [n, h, w, c], features, kernel, strides: the stages of a ResNet on 32x32 images, and patches
SHAPES = {
    "3x3, 64 channels": ((32, 32, 32, 64), 64, (3, 3), 1),
    "3x3, 256 channels": ((32, 8, 8, 256), 256, (3, 3), 1),
    "3x3, strides 2": ((32, 32, 32, 64), 128, (3, 3), 2),
    "1x1, 256 channels": ((32, 16, 16, 256), 256, (1, 1), 1),
}
RECIPES = ("delayed", "current", "hybrid")


def forward_backward(layer: nn.Module, x: jax.Array):
    """Return a jitted call: the output's inner product with an array, and its gradients."""
    variables = layer.init(jax.random.key(1), x)
    target = jax.random.normal(jax.random.key(9), layer.apply(variables, x).shape, x.dtype)

    @jax.jit
    def step(variables, x, target):
        def loss(params, sinks, x):
            y = layer.apply({**variables, "params": params, **sinks}, x)
            return jnp.vdot(y, target)

        sinks = {k: v for k, v in variables.items() if k == "fp8_sink"}
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(variables["params"], sinks, x)

    return functools.partial(step, variables, x, target)


def measure(repeats: int) -> dict[str, object]:
    """Return median milliseconds and ratios of every variant."""
    runs = {}
    for shape, (image, features, kernel, strides) in SHAPES.items():
        x = jax.random.normal(jax.random.key(0), image)
        arguments = {"features": features, "kernel_size": kernel, "strides": strides}
        runs[shape, "nn.Conv"] = forward_backward(nn.Conv(**arguments), x)
        for name in RECIPES:
            layer = jfp8.Conv(**arguments, recipe=jfp8.recipes.get(name))
            runs[shape, f"jfp8.Conv {name}"] = forward_backward(layer, x)
    median = interleaved_medians(runs, repeats)
    return {
        f"{shape}: {name}": {
            "ms": round(ms, 3),
            "ratio_to_nn.Conv": round(ms / median[shape, "nn.Conv"], 3),
        }
        for (shape, name), ms in median.items()
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21, help="interleaved runs per variant")
    arguments = parser.parse_args()
    results = measure(arguments.repeats)
    print(
        json.dumps(
            {
                "benchmark": "conv forward + backward",
                "repeats": arguments.repeats,
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
