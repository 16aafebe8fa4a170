"""Time `jfp8.cast` against clip and `astype`; print JSON.

Both give the same bytes, which is checked before they are timed. The figures are medians of
interleaved runs; the ratio is the time of `jfp8.cast` over the other's, so below 1 is faster.

    python benchmarks/cast.py --exponents 18 20 22 --repeats 41
"""

from __future__ import annotations

import argparse
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from common import environment, interleaved_medians

import jfp8

CASTS = {
    "float32 -> E4M3FN": (jnp.float32, jfp8.E4M3FN),
    "float32 -> E5M2": (jnp.float32, jfp8.E5M2),
    "bfloat16 -> E4M3FN": (jnp.bfloat16, jfp8.E4M3FN),
}


@functools.partial(jax.jit, static_argnums=1)
def cast(x: jax.Array, fmt: jfp8.Format) -> jax.Array:
    return jfp8.cast(x, fmt)


@functools.partial(jax.jit, static_argnums=1)
def clip_astype(x: jax.Array, fmt: jfp8.Format) -> jax.Array:
    """Cast with saturation in plain JAX."""
    return jnp.clip(x, -fmt.max, fmt.max).astype(fmt.dtype)


def sample(size: int, dtype: jax.typing.DTypeLike, fmt: jfp8.Format) -> jax.Array:
    """Return magnitudes spread evenly over binades, from half the smallest value to twice max."""
    low, high = math.log2(fmt.smallest_subnormal) - 1, math.log2(fmt.max) + 1
    exponent, sign = jax.random.uniform(jax.random.key(0), (2, size))
    magnitude = jnp.power(2.0, low + (high - low) * exponent)
    return jnp.where(sign < 0.5, -magnitude, magnitude).astype(dtype)


def measure(exponents: list[int], repeats: int) -> dict[str, object]:
    """Return medians and ratios of every cast of ``2**exponent`` elements."""
    results = {}
    for exponent in exponents:
        runs = {}
        for name, (dtype, fmt) in CASTS.items():
            x = sample(2**exponent, dtype, fmt)
            ours, plain = (np.asarray(f(x, fmt)).view(np.uint8) for f in (cast, clip_astype))
            np.testing.assert_array_equal(ours, plain)
            runs[name, "jfp8.cast"] = functools.partial(cast, x, fmt)
            runs[name, "clip + astype"] = functools.partial(clip_astype, x, fmt)
        ms = interleaved_medians(runs, repeats)
        ratios = {name: ms[name, "jfp8.cast"] / ms[name, "clip + astype"] for name in CASTS}
        results[f"2^{exponent}"] = {
            "geometric_mean_ratio": round(math.exp(np.mean(np.log(list(ratios.values())))), 3),
            "casts": {
                name: {
                    "ms jfp8.cast": round(ms[name, "jfp8.cast"], 4),
                    "ms clip + astype": round(ms[name, "clip + astype"], 4),
                    "ratio": round(ratio, 3),
                }
                for name, ratio in ratios.items()
            },
        }
    return results


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--exponents", type=int, nargs="+", default=[18, 20, 22], help="sizes, as powers of two"
    )
    parser.add_argument("--repeats", type=int, default=41, help="interleaved runs per cast")
    arguments = parser.parse_args()
    result = {
        "benchmark": "saturating cast",
        "repeats": arguments.repeats,
        **environment(),
        "results": measure(arguments.exponents, arguments.repeats),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
