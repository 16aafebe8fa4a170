"""Code that the clients of this folder share: data, training loops, and records.

A client is trained for 60 steps in f32 and under three recipes, with three seeds each, by Flax's
own loops or by its own trainer. Nothing in its files changes; the script has one line more.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jfp8

sys.path.insert(0, str(Path(__file__).parents[1]))
from results_file import write

RECIPES = ("delayed", "current", "mxfp8")
STEPS, SEEDS, LAST = 60, 3, 10
VOCABULARY = 32
ADAM = optax.adam(3e-3)
RESULTS = Path(__file__).parents[1] / "results" / "clients.json"


@dataclass
class Trained:
    """One run: the loss of each step, and CPU seconds of the first and of a later one."""

    losses: list[float]
    first: float
    step: float


@dataclass
class Client:
    """The conversion, report and training of a client.

    Attributes:
      name: name in the table.
      version: the client's.
      make: ``(seed) -> model``, without FP8.
      report: `jfp8.report` of the model, on inputs of the client.
      train: ``(model, seed) -> Trained``.
      needed: the projections: matmuls of an activation and a weight, without logits, embeddings
        and routers, counted by hand.
      looked_at: ``() -> model`` to count, if not ``make(0)``, such as one without remat,
        which would count matmuls twice.
      convert: the conversion to show; by default `jfp8.convert`.
    """

    name: str
    version: str
    make: Callable[[int], Any]
    report: Callable[[Any], jfp8.Report]
    train: Callable[[Any, int], Trained]
    needed: int
    convert: Callable[[Any, str], Any] = jfp8.convert
    looked_at: Callable[[], Any] | None = None


def tokens_of(seed: int, step: int, batch: int = 8, length: int = 32) -> jax.Array:
    """Return sequences in which a token mostly follows from the token before it."""
    rng = np.random.default_rng((seed, step))
    tokens = np.zeros((batch, length), np.int32)
    tokens[:, 0] = rng.integers(0, VOCABULARY, batch)
    for i in range(1, length):
        tokens[:, i] = (3 * tokens[:, i - 1] + 1) % VOCABULARY
        noise = rng.random(batch) < 0.1
        tokens[noise, i] = rng.integers(0, VOCABULARY, noise.sum())
    return jnp.asarray(tokens)


def images_of(seed: int, step: int, batch: int = 16, size: int = 16) -> tuple[jax.Array, jax.Array]:
    """Return images of ten classes, each a separate pattern with noise; and the classes."""
    patterns = np.random.default_rng(0).normal(size=(10, size, size, 3))
    rng = np.random.default_rng((seed, step))
    classes = rng.integers(0, 10, batch)
    images = patterns[classes] + 3.0 * rng.normal(size=(batch, size, size, 3))
    return jnp.asarray(images, jnp.float32), jnp.asarray(classes)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy of predicting each token from the tokens before it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.mean(losses)


def timed(steps: Iterator[Any]) -> Trained:
    """Run `steps`, each of which returns its loss."""
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.process_time()
        losses.append(float(next(steps)))
        seconds.append(time.process_time() - start)
    return Trained(losses, seconds[0], statistics.median(seconds[2:]))


def train_linen(
    loss_fn: Callable[[Any, Any, Any], jax.Array],
    batch_of: Callable[[int, int], Any],
    init: Callable[[Any, jax.Array], Any],
    model: Any,
    seed: int,
    tx: optax.GradientTransformation = ADAM,
) -> Trained:
    """Train by Flax's own ``TrainState``, which replaces FP8 state by its gradient.

    Args:
      loss_fn: ``(model, variables, batch) -> loss``.
      init: ``(model, key) -> variables``.
    """
    variables = jax.jit(functools.partial(init, model))(jax.random.key(seed))
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda v: loss_fn(model, v, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    def steps():
        nonlocal state
        for i in range(STEPS):
            state, loss = step(state, batch_of(seed, i))
            yield loss

    return timed(steps())


def convert_linen(model: Any, recipe: str) -> Any:
    """Convert a Linen client: the one line."""
    return jfp8.convert(model, recipe, state_collection="_overwrite_with_gradient")


def train_nnx(
    loss_fn: Callable[[Any, Any], jax.Array],
    batch_of: Callable[[int, int], Any],
    model: Any,
    seed: int,
    learning_rate: float = 3e-3,
) -> Trained:
    """Train by ``nnx.Optimizer`` and ``nnx.value_and_grad``."""
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return timed(step(model, optimizer, batch_of(seed, i)) for i in range(STEPS))


def counted(report: jfp8.Report) -> dict[str, Any]:
    """Count forward matmuls in FP8, and the reasons of the others."""
    forward = [row for row in report.rows if row.kind in ("fprop", "forward")]
    others = Counter()
    for row in forward:
        if not row.fp8:
            others[row.reason.partition(": ")[0] if "no layer" in row.reason else row.reason] += (
                row.times
            )
    return {"fp8": sum(row.times for row in forward if row.fp8), "others": dict(others)}


def version_of(package: str) -> str:
    """``"gemma 4.0.1"``."""
    return f"{package} {importlib.metadata.version(package)}"


def run(*clients: Client) -> None:
    """Train `clients`, all or the ones named on the command line, and add them to the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="of clients; default: all of the script")
    parser.add_argument("--count", action="store_true", help="only count products, record nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # clients' warnings, and jfp8's of scales that look ahead
    for client in clients:
        if not args.names or client.name in args.names:
            record = _record(client, args.count)
            print(json.dumps({client.name: record}, indent=1))
            if not args.count:
                results = json.loads(args.results.read_text()) if args.results.exists() else {}
                write(args.results, results | {client.name: record})


def _record(client: Client, only_count: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"version": client.version, "needed": client.needed}
    record |= {"python": sys.version.split()[0], "jax": jax.__version__}
    for recipe in ("f32", *RECIPES):
        convert = functools.partial(client.convert, recipe=recipe) if recipe != "f32" else None
        entry: dict[str, Any] = {}
        if convert is not None:
            looked_at = client.looked_at or functools.partial(client.make, 0)
            entry = counted(client.report(convert(looked_at())))
        if not only_count:
            entry |= _trained(client, convert)
        record[recipe] = entry
    return record


def _trained(client: Client, convert: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Train the seeds of one recipe. Later ones reuse the programs of the first."""
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        runs = []
        for seed in range(SEEDS):
            print(client.name, convert and convert.keywords, seed, file=sys.stderr)
            model = client.make(seed)
            runs.append(client.train(model if convert is None else convert(model), seed))
    jax.clear_caches()
    return {
        "losses": [round(float(np.mean(run.losses[-LAST:])), 6) for run in runs],
        "first_step_cpu_seconds": round(runs[0].first, 2),
        "step_cpu_ms": round(1e3 * statistics.median(run.step for run in runs), 2),
    }
