"""Signal-to-noise ratio of the three matmuls of every recipe against float64; print JSON.

``10 log10(sum y^2 / sum (y - y_fp8)^2)`` in dB, for standard normal operands: 6 dB are one bit.

    python benchmarks/product_accuracy.py --shape 1024 1024 2048
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np
from common import environment

import jfp8

RECIPES = {recipe.name: recipe() for recipe in jfp8.recipes.RECIPES} | {
    "mxfp8, floor": jfp8.recipes.MXFP8BlockScaling(scale_rounding="floor"),
    "current, E4M3": jfp8.recipes.Float8CurrentScaling(fp8_format="E4M3"),
    "current, hopper": jfp8.recipes.Float8CurrentScaling(accumulation="hopper"),
}


def decibels(exact: np.ndarray, approximate: jax.Array) -> float:
    noise = exact - np.asarray(approximate, np.float64)
    return float(10 * np.log10(np.sum(exact**2) / np.sum(noise**2)))


def measure(m: int, n: int, k: int) -> dict[str, dict[str, float]]:
    """Return dB of fprop, dgrad and wgrad for ``(m, k) @ (k, n)``."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((m, k), (k, n), (m, n))
    x, w, dy = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    exact_x, exact_w, exact_dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    exact = {
        "fprop": exact_x @ exact_w,
        "dgrad": exact_dy @ exact_w.T,
        "wgrad": exact_x.T @ exact_dy,
    }
    results = {}
    for name, recipe in RECIPES.items():

        @jax.jit
        def products(x, w, dy, recipe=recipe):
            def dot(x, w):
                return jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe)

            y, vjp = jax.vjp(dot, x, w)
            return (y, *vjp(dy))

        computed = zip(exact.items(), products(x, w, dy), strict=True)
        results[name] = {kind: round(decibels(y, y8), 2) for (kind, y), y8 in computed}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[1024, 1024, 2048], help="m, n, k")
    arguments = parser.parse_args()
    result = {
        "benchmark": "product accuracy",
        "shape": arguments.shape,
        **environment(),
        "dB": measure(*arguments.shape),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
