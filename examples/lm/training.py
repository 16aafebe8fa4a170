"""Code that the scripts share: optimizer, loss, one step, and a loop over models side by side."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfp8

from . import report

STEPS_PER_SYNC = 10  # the host waits for the device this often, to move the progress bar

# (state, batch) -> (state, {"loss": f32[], ...}); a state is whatever the step takes and returns.
# Numbers may be arrays, which become nested lists.
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


def make_optimizer(
    lr: float, steps: int, *, multiplier: float = 1.0
) -> optax.GradientTransformation:
    """Create AdamW with warm-up and cosine decay.

    The clipping threshold and eps are sizes of gradients. A multiplied loss multiplies every
    gradient, so both are multiplied, too, and AdamW divides it out again.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, min(30, steps // 2), steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0 * multiplier),
        optax.adamw(schedule, b2=0.98, eps=1e-8 * multiplier, weight_decay=0.05),
    )


def make_state(
    model: nn.Module, tx: optax.GradientTransformation, seed: int, tokens: np.ndarray
) -> jfp8.TrainState:
    """Create a state; one key gives an FP8 model and its float32 twin the same parameters."""
    variables = jax.jit(model.init)(jax.random.key(seed), tokens)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def cross_entropy(state: jfp8.TrainState, variables: Any, windows: jax.Array) -> jax.Array:
    """Return the mean loss, in nats, of predicting every byte from the bytes before it."""
    return next_byte_loss(state.apply_fn(variables, windows[:, :-1]), windows)


def next_byte_loss(logits: jax.Array, windows: jax.Array) -> jax.Array:
    """Return the loss of logits for all bytes of `windows` but the last, [batch, length-1, 256]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@functools.partial(jax.jit, static_argnames=("micro_batches", "multiplier"), donate_argnums=0)
def train_step(
    state: jfp8.TrainState, batch: jax.Array, *, micro_batches: int = 1, multiplier: float = 1.0
) -> tuple[jfp8.TrainState, dict[str, jax.Array]]:
    def loss_fn(variables, batch):
        return multiplier * cross_entropy(state, variables, batch), {}

    loss, grads = jfp8.value_and_grad(loss_fn, micro_batches=micro_batches)(state, batch)
    state = state.apply_gradients(grads)
    numbers = {"loss": loss / multiplier}
    loss_scale = optax.tree_utils.tree_get(state.opt_state, "loss_scale")
    if loss_scale is not None:
        numbers["loss_scale"] = loss_scale
    return state, numbers


def take_steps(
    steps: dict[str, Step], states: dict[str, Any], batches: list[Any]
) -> tuple[dict[str, Any], report.Numbers]:
    """Take one step per batch, of one model after the other. The host waits once for each."""
    states, numbers = dict(states), {}
    for run in states:
        start = time.perf_counter()
        pending = []
        for batch in batches:
            states[run], of_step = steps[run](states[run], batch)
            pending.append(of_step)
        numbers[run] = [{k: v.tolist() for k, v in n.items()} for n in jax.device_get(pending)]
        ms = 1000 * (time.perf_counter() - start) / len(batches)
        for of_step in numbers[run]:
            of_step["ms"] = round(ms, 2)
    return states, numbers


def train(
    steps: dict[str, Step],
    states: dict[str, Any],
    batch_at: Callable[[int], Any],
    count: int,
    *,
    compiling: int = 1,
) -> tuple[dict[str, Any], report.Numbers]:
    """Take `count` steps of every run on the same batches, with a progress bar.

    JAX compiles in the first `compiling` ones, which is not training time: they run before
    the bar starts, and have no milliseconds. If float32 is one of several runs, the returned states
    include its repetition on other batches, `report.AGAIN`.
    """
    first = copied(states["f32"]) if len(states) > 1 and "f32" in states else None
    batches = [batch_at(step) for step in range(min(compiling, count))]
    with report.compiling():
        states, numbers = take_steps(steps, states, batches)
    if count > compiling:
        numbers = {run: [_without_ms(n) for n in of_run] for run, of_run in numbers.items()}
    states, more = _take_all(steps, states, batch_at, range(len(batches), count))
    numbers = {run: of_run + more.get(run, []) for run, of_run in numbers.items()}
    if first is not None:
        states[report.AGAIN] = repeat(steps["f32"], first, batch_at, count)
    return states, numbers


def copied(state: Any) -> Any:
    """Copy a state that a step may donate or change in place."""
    return jax.tree.map(jnp.copy, state)


def repeat(step: Step, state: Any, batch_at: Callable[[int], Any], count: int) -> Any:
    """Take `count` steps on the batches after the first `count`; return the last state."""
    states, _ = _take_all({report.AGAIN: step}, {report.AGAIN: state}, batch_at,
                          range(count, 2 * count))  # fmt: skip
    return states[report.AGAIN]


def _take_all(
    steps: dict[str, Step], states: dict[str, Any], batch_at: Callable[[int], Any], indices: range
) -> tuple[dict[str, Any], report.Numbers]:
    """Take the steps with these indices, with a progress bar."""
    numbers: report.Numbers = {run: [] for run in states}
    with report.progress_bar(indices.start, indices.stop) as bar:
        for start in indices[::STEPS_PER_SYNC]:
            end = min(start + STEPS_PER_SYNC, indices.stop)
            batches = [batch_at(step) for step in range(start, end)]
            states, new = take_steps(steps, states, batches)
            for run, of_run in new.items():
                numbers[run] += of_run
            report.advance(bar, end, new)
    return states, numbers


def _without_ms(numbers: dict[str, float]) -> dict[str, float]:
    return {key: number for key, number in numbers.items() if key != "ms"}


@jax.jit
def _validation_loss(state: jfp8.TrainState, windows: jax.Array) -> jax.Array:
    return cross_entropy(state, state.variables, windows)


def validation_loss(state: jfp8.TrainState, batches: np.ndarray) -> float:
    return float(np.mean([_validation_loss(state, batch) for batch in batches], dtype=np.float64))
