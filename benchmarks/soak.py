"""Train a tiny model for very long with random faults in its values, and count failures.

    python benchmarks/soak.py > benchmarks/results/soak.json      # 20,000 steps, one or two minutes
    python benchmarks/soak.py --steps 2000 --recipe hybrid --opt-level O1

In one step of 40 one operand has a fault: a NaN, an Inf, a number close to the largest or below the
smallest of float32, zeros, or one constant everywhere. Sometimes it lasts for 50 steps. In between
the data changes its magnitude, which scales have to follow. After the last fault come steps without
one, whose loss is compared with the same run without faults.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import environment

import jfp8

STATM = Path("/proc/self/statm")
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Fault:
    """Replace elements of an operand by ``value + keep * x``.

    Attributes:
      value, keep: operands of the equation.
      everywhere: all elements, or one.
    """

    value: float = 0.0
    keep: float = 0.0
    everywhere: bool = False


FAULTS = {
    "nan": Fault(math.nan),
    "inf": Fault(math.inf),
    "-inf": Fault(-math.inf),
    "largest": Fault(FLOAT32_MAX),
    "-3e38": Fault(-3e38),
    "65504": Fault(65504.0),
    "times 1e12": Fault(keep=1e12, everywhere=True),
    "times 1e-30": Fault(keep=1e-30, everywhere=True),
    "subnormal": Fault(1e-40, everywhere=True),
    "zero": Fault(everywhere=True),
    "constant": Fault(0.5, everywhere=True),
}
NON_FINITE = ("nan", "inf", "-inf")
LAYERS = ("Dense_0", "Dense_1")
# The three operands of each layer's matmuls, and the other inputs of the loss.
OPERANDS = tuple(f"{layer} {role}" for layer in LAYERS for role in ("lhs", "rhs", "grad"))
PLACES = (*OPERANDS, *(f"{layer} bias" for layer in LAYERS), "labels")


def injected(place: str, kind: str, element: int = 0) -> dict[str, np.generic]:
    """Return the fault `kind` at `place` as input of one program for all faults."""
    fault = FAULTS[kind]
    return {
        "place": np.int32(PLACES.index(place)),
        "value": np.float32(fault.value),
        "keep": np.float32(fault.keep),
        "everywhere": np.bool_(fault.everywhere),
        "element": np.int32(element),
    }


NOTHING = {**injected("labels", "zero"), "place": np.int32(-1)}


def hurt(x: jax.Array, place: str, fault: dict[str, Any]) -> jax.Array:
    """Return `x` with the fault, if this is its place."""
    element = jnp.arange(x.size).reshape(x.shape) == fault["element"] % x.size
    chosen = (fault["place"] == PLACES.index(place)) & (fault["everywhere"] | element)
    return jnp.where(chosen, fault["value"] + fault["keep"] * x, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def hurt_gradient(y: jax.Array, place: str, fault: dict[str, Any]) -> jax.Array:
    """Return `y`, whose gradient has the fault."""
    return y


hurt_gradient.defvjp(
    lambda y, place, fault: (y, fault),
    lambda place, fault, dy: (hurt(dy, place, fault), None),
)

BATCH, FEATURES, WIDTH, OUTPUTS = 32, 64, 64, 8  # 64 * 64: O2 stores moments of 4096 elements


class Net(nn.Module):
    """Two layers, with places for faults."""

    @nn.compact
    def __call__(self, x: jax.Array, fault: dict[str, Any]) -> jax.Array:
        for layer, features in zip(LAYERS, (WIDTH, OUTPUTS), strict=True):
            x = x if layer == LAYERS[0] else nn.gelu(x)
            y = nn.Dense(features, name=layer)(hurt(x, f"{layer} lhs", fault))
            x = hurt_gradient(y, f"{layer} grad", fault)
        return x


def with_hurt_params(params: Any, fault: dict[str, Any]) -> Any:
    """Return `params` with the fault, if a weight or bias is its place."""
    roles = {"kernel": "rhs", "bias": "bias"}
    return {
        layer: {name: hurt(p, f"{layer} {roles[name]}", fault) for name, p in params[layer].items()}
        for layer in LAYERS
    }


def create(
    recipe: str, opt_level: str, tx: optax.GradientTransformation
) -> tuple[jfp8.TrainState, Callable[..., Any]]:
    """Create the state and the loss, which takes a fault with the batch.

    The loss has gradients between -1 and 1 whatever the output is: where something is huge, no Inf
    comes of it that would end the matter.
    """
    model, tx = jfp8.initialize(Net(), tx, recipe=recipe, opt_level=opt_level, exempt=())

    def loss_fn(variables: Any, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        fault = batch["fault"]
        params = with_hurt_params(variables["params"], fault)
        y = model.apply({**variables, "params": params}, batch["x"], fault)
        return jnp.mean(optax.log_cosh(y, hurt(batch["y"], "labels", fault))), {}

    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((BATCH, FEATURES)), NOTHING)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx), loss_fn


TEACHER = np.random.default_rng(7).normal(size=(FEATURES, OUTPUTS)) / math.sqrt(FEATURES)


def batch_of(step: int, magnitude: float = 1.0, fault: dict[str, Any] = NOTHING) -> dict[str, Any]:
    """Return inputs, labels from a layer with tanh, and a fault."""
    x = np.random.default_rng(step).normal(size=(BATCH, FEATURES))
    y = np.tanh(x @ TEACHER)
    return {"x": np.float32(magnitude * x), "y": np.float32(y), "fault": fault}


# The long run.

RATE, BURST_RATE, BURST = 1 / 40, 1 / 1000, 50  # faults and bursts per step; steps of a burst
WARM_UP, RECOVERY = 64, 200  # steps without faults at the beginning and at the end
CHECK_EVERY = 64  # steps; so often the scales are looked at
HISTORY = jfp8.recipes.DelayedScaling().amax_history_len
MAGNITUDES = (1.0, 3.0, 0.25, 1.5)  # factors on the data, each for CHECK_EVERY steps


def plan(steps: int, seed: int) -> Iterator[tuple[str, str, int] | None]:
    """Return the fault of every step, (place, kind, element), or None."""
    draw = np.random.default_rng(seed)
    left = 0  # steps of a burst
    for step in range(steps):
        quiet = step < WARM_UP or step >= steps - RECOVERY
        chance = draw.random()
        left = 0 if quiet else BURST if chance < BURST_RATE else max(left - 1, 0)
        if quiet or not (left or chance < BURST_RATE + RATE):
            yield None
            continue
        place = PLACES[draw.integers(len(PLACES))]
        kind = "nan" if left else list(FAULTS)[draw.integers(len(FAULTS))]
        yield place, kind, int(draw.integers(1 << 20))


def must_be_skipped(place: str, kind: str) -> bool:
    """Return True if a fault reaches gradients, or a matmul's operand, as NaN or Inf."""
    return kind == "nan" or (kind in NON_FINITE and place not in ("Dense_1 bias", "labels"))


def histories(fp8: Any) -> dict[str, np.ndarray]:
    """Return the history of each tensor, from which its scale is computed."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(jax.device_get(fp8))
        if "amax_history" in jax.tree_util.keystr(path)
    }


def resident_bytes() -> int | None:
    """Return the memory of this process on Linux."""
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None
    )


@dataclass
class Compilations:
    """Count the programs that XLA compiles, from its creation on."""

    count: int = 0

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **about: Any) -> None:
        self.count += "backend_compile" in event


@dataclass(frozen=True)
class Run:
    """The record of a run.

    Attributes:
      faults: how often each kind.
      must_skip, skipped: steps that had to be skipped, and that were.
      non_finite: parameters that were, at any check.
      checked, frozen: scales inspected, and scales whose history is unchanged since the last check.
      wrong_amaxes: checks in which the newest entry of the first history is not from the data.
      live_arrays, resident_bytes, compiled: at the first check, and at the last.
      loss: mean of the last `RECOVERY` / 2 steps.
    """

    faults: dict[str, int]
    must_skip: int
    skipped: int
    non_finite: int
    checked: int
    frozen: int
    wrong_amaxes: int
    live_arrays: tuple[int, int]
    resident_bytes: tuple[int | None, int | None]
    compiled: tuple[int, int]
    loss: float


def train(
    state: jfp8.TrainState,
    step: Callable[..., Any],
    faults: Sequence[tuple[str, str, int] | None],
    compilations: Compilations,
) -> Run:
    """Run with a fault, or None, in each step."""
    kinds: collections.Counter[str] = collections.Counter()
    must_skip = non_finite = checked = frozen = wrong_amaxes = 0
    losses: collections.deque[float] = collections.deque(maxlen=RECOVERY // 2)
    pending: list[jax.Array] = []
    memory: list[tuple[int, int | None, int]] = []
    before, good_before = histories(state.fp8), 0
    for i, fault in enumerate(faults):
        magnitude = MAGNITUDES[i // CHECK_EVERY % len(MAGNITUDES)]
        batch = batch_of(i, magnitude, injected(*fault) if fault else NOTHING)
        state, loss = step(state, batch)
        pending.append(loss)
        if fault:
            kinds[fault[1]] += 1
            must_skip += must_be_skipped(*fault[:2])
        if (i + 1) % CHECK_EVERY and i + 1 != len(faults):
            continue

        losses.extend(map(float, pending))
        pending.clear()
        params = jax.device_get(jax.tree.leaves(state.params))
        non_finite += sum(int((~np.isfinite(leaf)).sum()) for leaf in params)
        now = histories(state.fp8)
        skipped = int(optax.tree.get(state.opt_state, "overflow_count"))
        # After as many good steps as a history is long, nothing in it is as old as the last check.
        if i + 1 - skipped - good_before > HISTORY:
            checked += len(now)
            frozen += sum(np.array_equal(now[name], before[name]) for name in now)
            before, good_before = now, i + 1 - skipped
        if now and not fault:
            newest = optax.tree.get(state.fp8[LAYERS[0]], "lhs")["amax_history"][0]
            wrong_amaxes += bool(newest != np.max(np.abs(batch["x"])))
        memory.append((len(jax.live_arrays()), resident_bytes(), compilations.count))

    live, resident, compiled = zip(memory[0], memory[-1], strict=True)
    loss = float(np.mean(losses))
    return Run(dict(sorted(kinds.items())), must_skip, skipped, non_finite, checked, frozen,
               wrong_amaxes, live, resident, compiled, loss)  # fmt: skip


def soak(steps: int, recipe: str, opt_level: str, seed: int) -> dict[str, Any]:
    """Run the same steps with and without faults, in one program, and compare them."""
    compilations = Compilations()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if not jfp8.recipes.get(recipe).needs_loss_scale:  # otherwise `initialize` adds one
        tx = optax.chain(jfp8.loss_scale(growth_interval=500), tx)
    state, loss_fn = create(recipe, opt_level, tx)
    traces: collections.Counter[str] = collections.Counter()

    def counted_loss(variables: Any, batch: Any) -> Any:
        traces["loss_fn"] += 1  # when JAX traces it, and only then
        return loss_fn(variables, batch)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        traces["step"] += 1
        loss, grads = jfp8.value_and_grad(counted_loss)(state, batch)
        return state.apply_gradients(grads), loss

    run = train(state, step, list(plan(steps, seed)), compilations)
    without = train(state, step, [None] * steps, compilations)
    megabytes = [None if size is None else size // 10**6 for size in run.resident_bytes]
    return {
        "steps": steps,
        "faults": run.faults,
        "faults_in_all": sum(run.faults.values()),
        "steps_that_must_be_skipped": run.must_skip,
        "steps_skipped": run.skipped,
        "steps_skipped_without_faults": without.skipped,
        "non_finite_parameters": run.non_finite,
        "scales_checked": run.checked,
        "frozen_scales": run.frozen,
        "wrong_amaxes": run.wrong_amaxes,
        "traces": dict(traces),
        "compilations_until_the_first_check": run.compiled[0],
        "compilations_after_it": run.compiled[1] - run.compiled[0],
        "live_arrays": run.live_arrays,
        "resident_megabytes": megabytes,
        "loss": run.loss,
        "loss_without_faults": without.loss,
    }


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--recipe", default="delayed", help="a name, see jfp8.recipes.get")
    parser.add_argument("--opt-level", choices=("O0", "O1", "O2"), default="O2")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    arguments = parser.parse_args(argv)
    result = soak(**vars(arguments))
    print(json.dumps({"settings": vars(arguments), **result, **environment()}, indent=2))


if __name__ == "__main__":
    main()
