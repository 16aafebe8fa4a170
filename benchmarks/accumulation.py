"""Time `scaled_matmul` by `accumulation`, and measure the errors of the sums; print JSON.

The times are medians of interleaved runs, as ratios to "f32". The errors are relative to
sum |a b|, against float64 of the same stored values, so they do not contain the rounding to FP8:
largest, mean, and mean with its sign (the bias), on data of both signs and on their absolute
values. Everything called "hopper" is emulated.

    python benchmarks/accumulation.py --shape 256 256 1024 --repeats 21
"""

from __future__ import annotations

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from common import environment, interleaved_medians

import jfp8

ACCUMULATIONS = ("f32", "f32_every_128", "hopper", "hopper_every_128")
DIMENSION_NUMBERS = (((1,), (1,)), ((), ()))


@functools.partial(jax.jit, static_argnames="accumulation")
def multiply(lhs: jfp8.ScaledArray, rhs: jfp8.ScaledArray, accumulation: str) -> jax.Array:
    return jfp8.scaled_matmul(lhs, rhs, DIMENSION_NUMBERS, accumulation=accumulation)


def operands(m: int, n: int, k: int, seed: int) -> dict[str, tuple[jfp8.ScaledArray, ...]]:
    """E4M3 operands, the rows of which are multiplied; scales are powers of two, hence exact."""
    keys = jax.random.split(jax.random.key(seed))
    normal = [jax.random.normal(key, (rows, k)) for key, rows in zip(keys, (m, n), strict=True)]
    quantize = functools.partial(jfp8.quantize, scale_rounding="power_of_two")
    return {
        "normal": tuple(quantize(x) for x in normal),
        "absolute values of normal": tuple(quantize(jnp.abs(x)) for x in normal),
    }


def errors(lhs: jfp8.ScaledArray, rhs: jfp8.ScaledArray) -> dict[str, dict[str, float]]:
    """Errors of each accumulation, in units of sum |a b|."""
    a, b = (np.asarray(q.data).astype(np.float64) * float(q.scale) for q in (lhs, rhs))
    exact, magnitude = a @ b.T, abs(a) @ abs(b).T
    result = {}
    for accumulation in ACCUMULATIONS:
        product = np.asarray(multiply(lhs, rhs, accumulation=accumulation), np.float64)
        error = (product - exact) / magnitude
        figures = {"max": abs(error).max(), "mean": abs(error).mean(), "bias": error.mean()}
        result[accumulation] = {name: float(f"{value:.2e}") for name, value in figures.items()}
    return result


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[256, 256, 1024], metavar=tuple("MNK")
    )
    parser.add_argument("--repeats", type=int, default=21, help="interleaved runs of each")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = operands(*arguments.shape, arguments.seed)
    median = interleaved_medians(
        {name: functools.partial(multiply, *data["normal"], name) for name in ACCUMULATIONS},
        arguments.repeats,
    )
    print(
        json.dumps(
            {
                "benchmark": "accumulation of scaled_matmul",
                "shape": dict(zip("mnk", arguments.shape, strict=True)),
                "repeats": arguments.repeats,
                "seed": arguments.seed,
                **environment(),
                "times": {
                    name: {"ms": round(ms, 3), "ratio_to_f32": round(ms / median["f32"], 2)}
                    for name, ms in median.items()
                },
                "errors_relative_to_sum_of_magnitudes": {
                    kind: errors(*pair) for kind, pair in data.items()
                },
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
