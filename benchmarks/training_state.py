"""Count the bytes per parameter of a whole training state: weights, masters, moments, gradients.

The model is from examples/train_lm.py. Every row is really set up and takes one step; counted
are the arrays of its state, and its gradients as the backward pass returns them. Not counted:
activations, and amax histories (a few numbers for each matmul, see "other").

    python benchmarks/training_state.py --width 512 --layers 4
    python benchmarks/training_state.py --json > benchmarks/results/training_state.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import environment

import jfp8
from jfp8.optim import init_masters, master_weights

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm.model import Transformer

ADAMW = optax.adamw(1e-3)
CURRENT = jfp8.recipes.Float8CurrentScaling()
# Embeddings are looked up, not multiplied; the head of the example stays in high precision.
HIGH_PRECISION = ("head",)


@dataclass(frozen=True)
class Row:
    """One configuration of training.

    Attributes:
      optimizer: constructor of the optimizer, converted to its level.
      recipe: recipe of the matmuls; None for f32.
      dtype: dtype of the parameters.
      fp8_weights: kernels of FP8 matmuls are stored in FP8.
    """

    optimizer: Callable[[], optax.GradientTransformation]
    recipe: Any = CURRENT
    dtype: Any = jnp.float32
    fp8_weights: bool = False


def level(opt_level: str) -> optax.GradientTransformation:
    _, tx = jfp8.initialize(Transformer(), ADAMW, recipe=CURRENT, opt_level=opt_level)
    return tx


def in_blocks() -> optax.GradientTransformation:
    return jfp8.optim.adamw(1e-3)


ROWS = {
    "f32": Row(lambda: ADAMW, recipe=None),
    "bf16 weights, f32 master": Row(
        lambda: master_weights(optax.adamw(1e-3), "float32"), recipe=None, dtype=jnp.bfloat16
    ),
    "bf16 weights, no master": Row(
        lambda: master_weights(optax.adamw(1e-3)), recipe=None, dtype=jnp.bfloat16
    ),
    "FP8 products (O0)": Row(lambda: level("O0")),
    "O1": Row(lambda: level("O1")),
    "O2": Row(lambda: level("O2")),
    "moments in blocks": Row(in_blocks),
    "bf16 weights, moments in blocks": Row(lambda: master_weights(in_blocks()), dtype=jnp.bfloat16),
    "FP8 weights, f32 master, moments in blocks": Row(
        lambda: master_weights(in_blocks(), "float32"), fp8_weights=True
    ),
    "FP8 weights, f16 master, moments as O2 (MS-AMP O3)": Row(
        lambda: master_weights(jfp8.optim.adamw(1e-3, preset="msamp_o2"), "float16_scaled"),
        fp8_weights=True,
    ),
    "FP8 weights, bf16 master, moments in blocks": Row(
        lambda: master_weights(in_blocks(), "bfloat16"), fp8_weights=True
    ),
    "FP8 weights, no master, moments in blocks": Row(
        lambda: master_weights(in_blocks()), fp8_weights=True
    ),
}


def held(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def masters_of(opt_state: Any) -> Any:
    is_state = lambda node: isinstance(node, jfp8.optim.MasterWeightsState)
    states = jax.tree.leaves(opt_state, is_leaf=is_state)
    return [state.masters for state in states if is_state(state)]


def count(row: Row, arguments: argparse.Namespace) -> dict[str, float]:
    """Return bytes per parameter of each component of the state, after a step."""
    model = Transformer(
        width=arguments.width,
        layers=arguments.layers,
        max_length=arguments.length,
        recipe=row.recipe,
    )
    tokens = jnp.zeros((2, arguments.length), jnp.int32)
    variables = dict(jax.jit(model.init)(jax.random.key(0), tokens))
    original = variables["params"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(original))
    variables["params"] = jax.tree.map(lambda p: p.astype(row.dtype), original)
    if row.fp8_weights:
        variables["params"] = jfp8.quantize_params(original, CURRENT, exempt=HIGH_PRECISION)
    tx = row.optimizer()
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
    if row.fp8_weights:
        state = state.replace(opt_state=init_masters(state.opt_state, original))

    def loss_fn(variables, tokens):
        logits = model.apply(variables, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.mean(losses), {}

    @jax.jit
    def step(state, tokens):
        _, grads = jfp8.value_and_grad(loss_fn)(state, tokens)
        return state.apply_gradients(grads), grads.params

    state, gradients = step(state, tokens)
    masters = masters_of(state.opt_state)
    parts = {
        "weights": held(state.params),
        "masters": held(masters),
        "moments": held(state.opt_state) - held(masters),
        "gradients": held(gradients),
        "other": held((state.step, state.fp8, state.collections)),
    }
    per_parameter = {name: size / parameters for name, size in parts.items()}
    return {**per_parameter, "total": sum(per_parameter.values())}


def markdown(rows: dict[str, dict[str, float]]) -> str:
    columns = ["weights", "masters", "moments", "gradients", "total"]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[c]:.2f}" for c in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    arguments = parser.parse_args()
    rows = {name: count(row, arguments) for name, row in ROWS.items()}
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        result = {"settings": settings, "bytes_per_parameter": rows, **environment()}
        print(json.dumps(result, indent=2))
    else:
        print(markdown(rows))


if __name__ == "__main__":
    main()
