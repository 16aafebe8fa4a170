"""Write checksums of a small GPT in FP8 training, and compare two platforms by them.

Called by `lm_on_gpu.py`. Parameters and batches are numbers that numpy makes, equal everywhere.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import environment

import jfp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lm.plain_gpt import GPT

STEPS, RECIPES = 20, ("delayed", "current")


def parameters(shapes: Any) -> Any:
    """Return parameters from a generator of uniform numbers, whose bits are the same everywhere."""
    rng = np.random.default_rng(0)

    def values(path: Any, leaf: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        width = (3 / 256) ** 0.5 if "kernel" in name else 0.05
        return ("scale" in name) + width * (2 * rng.random(leaf.shape) - 1).astype(np.float32)

    return jax.tree.map_with_path(values, shapes)


def checksums(tree: Any) -> dict[str, list[float]]:
    """Return the norm of each array, and its product with fixed signs, summed in float64."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        x = np.asarray(leaf, np.float64).ravel()
        signs = np.random.default_rng(1).integers(0, 2, x.size) * 2.0 - 1.0
        found[jax.tree_util.keystr(path)] = [float(np.sqrt(x @ x)), float(signs @ x)]
    return found


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: jfp8.TrainState, windows: Any) -> tuple[jfp8.TrainState, jax.Array]:
    def loss_fn(variables: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
        logits = state.apply_fn(variables, windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean(), {}

    loss, grads = jfp8.value_and_grad(loss_fn)(state, windows)
    return state.apply_gradients(grads), loss


def digest_of(recipe: Any) -> list[dict[str, Any]]:
    """Return losses and checksums of `STEPS` steps; before the first, only checksums."""
    rng = np.random.default_rng(2)
    steps = rng.integers(0, 4, (STEPS, 8, 129))
    batches = (np.cumsum(steps, axis=-1) % 256).astype(np.int32)
    model = jfp8.convert(GPT(width=256, layers=2, heads=4, max_length=128), recipe)
    variables = dict(jax.jit(model.init)(jax.random.key(0), batches[0][:, :-1]))
    variables["params"] = parameters(variables["params"])
    tx = optax.sgd(0.05, momentum=0.9)  # Adam would magnify noise where a gradient is 0
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def sums() -> dict[str, Any]:
        every = checksums(state.fp8)
        histories = {path: sums for path, sums in every.items() if "amax_history" in path}
        return {"params": checksums(state.params), "histories": histories}

    found: list[dict[str, Any]] = [{"loss": 0.0, **sums()}]
    for batch in batches:
        state, loss = train_step(state, batch)
        found.append({"loss": float(loss), **sums()})
    return found


def digest(path: str) -> None:
    """Write the digest of every recipe on the default device to `path`, as JSON."""
    jax.config.update("jax_default_matmul_precision", "highest")
    result = {recipe: digest_of(recipe) for recipe in RECIPES}
    Path(path).write_text(json.dumps({**environment(), "recipes": result}, indent=1))
    for recipe, steps in result.items():
        print(recipe, "losses", [round(s["loss"], 5) for s in steps[1:]])


def compare(first: str, second: str) -> None:
    """Print the largest difference per step, relative to the norm of the first's array."""
    a, b = (json.loads(Path(path).read_text()) for path in (first, second))
    print(f"{a['device']} {a['versions']}\n{b['device']} {b['versions']}")
    for recipe in a["recipes"]:
        print(f"{recipe}: step, loss, params, histories: largest relative differences")
        pairs = zip(a["recipes"][recipe], b["recipes"][recipe], strict=True)
        for number, (x, y) in enumerate(pairs):
            loss = abs(x["loss"] - y["loss"]) / (abs(x["loss"]) or 1.0)
            parts = [furthest(x[kind], y[kind]) for kind in ("params", "histories")]
            print(f"{number:4}  {loss:.2e}  " + "  ".join(parts))


def furthest(a: dict[str, list[float]], b: dict[str, list[float]]) -> str:
    """Return the largest relative difference of checksums and the path of its array."""
    if a.keys() != b.keys():
        raise ValueError(f"different arrays: {sorted(a.keys() ^ b.keys())}")
    gaps = [
        (max(abs(p - q) for p, q in zip(a[k], b[k], strict=True)) / (a[k][0] or 1.0), k) for k in a
    ]
    largest, path = max(gaps, default=(0.0, "none"))
    return f"{largest:.2e} {path if largest else ''}"
