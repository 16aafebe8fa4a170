"""Count the bytes that a chain of Dense layers saves for its backward pass; print JSON.

They are the arrays inside the function that `jax.vjp` returns, each counted once. Flax's layer
saves its input and its kernel; in f32 that kernel is the parameter itself, which exists anyway, so
bytes beyond parameters and the first input are counted, too. jfp8 saves one byte per
element of both, and scales. Nothing is computed: shapes suffice.

    python benchmarks/residuals.py --layers 8 --batch 4096 --features 512
"""

from __future__ import annotations

import argparse
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from common import environment

import jfp8

LAYERS = {"nn.Dense": nn.Dense, "jfp8.Dense": jfp8.Dense}


def held_bytes(layer: type[nn.Module], arguments: argparse.Namespace, dtype) -> dict[str, int]:
    """Return bytes saved for the backward pass: all, and beyond parameters and input."""
    model = nn.Sequential([layer(arguments.features, dtype=dtype) for _ in range(arguments.layers)])
    x = jax.ShapeDtypeStruct((arguments.batch, arguments.features), dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def residuals(variables, x):
        # Histories are read, not differentiated; everything else is, as in a training step.
        histories = {name: value for name, value in variables.items() if name == "fp8"}
        rest = {name: value for name, value in variables.items() if name != "fp8"}
        _, backward = jax.vjp(lambda rest, x: model.apply({**rest, **histories}, x), rest, x)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(residuals)(variables, x).jaxpr
    held = set(jaxpr.outvars)

    def total(values) -> int:
        return sum(v.aval.size * v.aval.dtype.itemsize for v in values)

    return {
        "bytes": total(held),
        "bytes_beyond_parameters_and_input": total(held - set(jaxpr.invars)),
    }


def main() -> None:
    """Parse arguments, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4096, help="rows of the input")
    parser.add_argument("--features", type=int, default=512, help="inputs and outputs of a layer")
    arguments = parser.parse_args()
    results = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        counted = {name: held_bytes(layer, arguments, dtype) for name, layer in LAYERS.items()}
        ratios = {
            f"ratio_{key}": round(counted["jfp8.Dense"][key] / counted["nn.Dense"][key], 4)
            for key in counted["nn.Dense"]
        }
        results[np.dtype(dtype).name] = {**counted, **ratios}
    print(
        json.dumps(
            {
                "benchmark": "bytes held for the backward pass",
                **vars(arguments),
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
