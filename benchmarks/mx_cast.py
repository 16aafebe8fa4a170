"""Time the quantization into blocks of 32 with E8M0 scales along either axis; print JSON.

It is timed next to a plain copy of the same array and a copy of its blocks' maxima, because memory
bounds a cast: at least one read of f32 and one write of a byte per element. Figures are medians of
interleaved runs, in elements per second.

    python benchmarks/mx_cast.py --size 1024 --repeats 101
"""

from __future__ import annotations

import argparse
import functools
import json

import jax
import jax.numpy as jnp
from common import environment, interleaved_medians

import jfp8


@jax.jit
def copy(x: jax.Array) -> jax.Array:
    """Read four bytes of every element and write four. (An identity would not be run.)"""
    return x + 1.0


@functools.partial(jax.jit, static_argnums=1)
def mx(x: jax.Array, axis: int) -> jfp8.ScaledArray:
    block = jfp8.Block((1, 32) if axis == 1 else (32, 1))
    return jfp8.quantize(x, granularity=block, scale_rounding="rceil")


@jax.jit
def mx_both(x: jax.Array) -> tuple[jfp8.ScaledArray, jfp8.ScaledArray]:
    return mx(x, 0), mx(x, 1)


def measure(size: int, repeats: int) -> dict[str, object]:
    """Return medians for a square array of `size`."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    runs = {
        "copy": functools.partial(copy, x),
        "MX along axis 1": functools.partial(mx, x, 1),
        "MX along axis 0": functools.partial(mx, x, 0),
        "MX along both": functools.partial(mx_both, x),
    }
    ms = interleaved_medians(runs, repeats)
    return {
        name: {
            "ms": round(value, 4),
            "G elements/s": round(x.size / value / 1e6, 2),
            "ratio_to_copy": round(value / ms["copy"], 2),
        }
        for name, value in ms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="rows and columns")
    parser.add_argument("--repeats", type=int, default=101, help="interleaved runs per variant")
    arguments = parser.parse_args()
    result = {
        "benchmark": "MX cast",
        "size": arguments.size,
        "repeats": arguments.repeats,
        **environment(),
        "results": measure(arguments.size, arguments.repeats),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
