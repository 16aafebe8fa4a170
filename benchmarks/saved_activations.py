"""Memory of a training step's backward pass, by the format of saved activations; print JSON.

A `nn.scan` over blocks: of an MLP (normalization, dense, gelu, dense, residual), and of a whole
Transformer layer. For each way to save activations:

  temp_bytes       temporary memory of the compiled gradient of all parameters: saved for the
                   backward pass, and intermediate
  kept_bytes       bytes saved for the backward pass of all blocks, next to parameters and input, by
                   dtypes of the program; XLA:CPU widens bf16, which temp_bytes shows
  gradient_sqnr    decibels of the gradient above its difference from the one of equal parameters
                   with f32 products and f32 activations, computed on a smaller input

    python benchmarks/saved_activations.py --layers 16 --batch 8 --length 64 --features 256
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from common import environment
from jax.extend.core import Var

import jfp8

KEY = jax.random.key(0)


class Flax(nn.Module):
    """A block of Flax's own layers."""

    hidden: int
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x` plus the output of the block."""
        how = {"dtype": self.dtype}
        if self.heads:
            y = nn.MultiHeadDotProductAttention(self.heads, **how)(nn.LayerNorm(**how)(x))
            x = x + y.astype(x.dtype)
        y = nn.gelu(nn.Dense(self.hidden, **how)(nn.LayerNorm(**how)(x)))
        return x + nn.Dense(x.shape[-1], **how)(y).astype(x.dtype)


class Fp8(nn.Module):
    """An equal block of jfp8's layers."""

    hidden: int
    heads: int
    saved_activations: jfp8.Format | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x` plus the output of the block."""
        how = {"saved_activations": self.saved_activations}
        if self.heads:
            return jfp8.TransformerLayer(x.shape[-1], self.hidden, self.heads, **how)(x)
        return x + jfp8.LayerNormMLP(self.hidden, **how)(x)


class Stack(nn.Module):
    """`layers` blocks, one after the other in a loop."""

    block: type[nn.Module]
    fields: dict[str, Any]
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the result of the last block."""
        scan = nn.scan(
            lambda block, x: (block(x), None),
            variable_axes={"params": 0, "fp8": 0, "fp8_sink": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        return scan(self.block(**self.fields, name="blocks"), x)[0]


def remat(block: type[nn.Module], *names: str) -> type[nn.Module]:
    """Return `block`, which saves only values with one of `names` for the backward pass."""
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return nn.remat(block, policy=policy, prevent_cse=False)


SAVING = {"saved_activations": jfp8.E4M3FN}
WAYS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "f32": (Flax, {}),
    "bf16": (Flax, {"dtype": jnp.bfloat16}),
    "f32, everything computed again": (remat(Flax), {}),
    "FP8 products": (Fp8, {}),
    "FP8 products and saved activations": (Fp8, SAVING),
    "the same, and only they are kept": (remat(Fp8, "fp8_saved"), SAVING),
}


def gradient(model: Stack):
    """Return the gradient of a loss with respect to the parameters."""

    def loss(params, x):
        return jnp.mean(jnp.sin(model.apply({"params": params}, x)))

    return jax.jit(jax.grad(loss))


def kept_bytes(model: Stack, params: Any, x: Any) -> int:
    """Return bytes saved for the backward pass, next to parameters and input."""

    def residuals(params, x):
        of = lambda params, x: model.apply({"params": params}, x)
        return jax.tree.leaves(jax.vjp(of, params, x)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, x).jaxpr
    kept = {v for v in jaxpr.outvars if isinstance(v, Var)} - set(jaxpr.invars)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def gradient_sqnr(model: Stack, x: jax.Array) -> float:
    """Compare with f32 matmuls and activations, for a model with jfp8's layers."""
    params = jax.jit(model.init)(KEY, x)["params"]
    fields = {**model.fields, "saved_activations": None}
    with jfp8.autocast(enabled=False):
        expected = gradient(model.clone(fields=fields))(params, x)
    got, expected = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)
        for tree in (gradient(model)(params, x), expected)
    )
    return float(20 * np.log10(np.linalg.norm(expected) / np.linalg.norm(got - expected)))


def measured(arguments: argparse.Namespace, heads: int) -> dict[str, dict[str, Any]]:
    """Measure every way to save activations, for blocks with `heads` of attention, or none."""
    x = jax.ShapeDtypeStruct((arguments.batch, arguments.length, arguments.features), jnp.float32)
    small = jax.random.normal(KEY, (2, min(arguments.length, 32), arguments.features))
    table: dict[str, dict[str, Any]] = {}
    for way, (block, fields) in WAYS.items():
        fields = {"hidden": arguments.hidden, "heads": heads, **fields}
        model = Stack(block, fields, arguments.layers)
        params = jax.eval_shape(model.init, KEY, x)["params"]
        compiled = gradient(model).lower(params, x).compile()
        row = {
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "kept_bytes": kept_bytes(model, params, x),
        }
        first = table.get("f32", row)
        row |= {f"{name}_to_f32": round(row[name] / first[name], 3) for name in tuple(row)}
        if "FP8" in way:
            row["gradient_sqnr"] = round(gradient_sqnr(model, small), 2)
        table[way] = row
    return table


def main() -> None:
    """Parse arguments, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024, help="features within the MLP")
    parser.add_argument("--heads", type=int, default=8)
    arguments = parser.parse_args()
    results = {"mlp": measured(arguments, 0), "layer": measured(arguments, arguments.heads)}
    print(
        json.dumps(
            {
                "benchmark": "memory of the backward pass, by what activations are kept in",
                **vars(arguments),
                **environment(),
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
