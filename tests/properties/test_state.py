"""FP8 state after steps of random programs, against what NumPy says their products saw."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfp8
from support.random_programs import (
    ROWS,
    WIDTH,
    Place,
    Program,
    Uses,
    leaf,
    overflowed,
    programs,
    scans_in_shared_scan,
)

pytestmark = pytest.mark.property

# Every example compiles a program.
some_programs = settings(max_examples=max(settings.default.max_examples // 3, 1))
NUMBERS = np.array([1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5])  # exact in e4m3 and e5m2
EXACT = 2.0**-22  # relative error of an amax after a division and a multiplication
BIN = 9 / 8
# Amaxes so close that a sink takes them for equal are averaged: by that, times sqrt(uses - 1).
AVERAGED = 1.4e-3
# How hard LLVM optimizes takes half of the time to compile, and cannot change exact numbers.
QUICKLY = {"xla_backend_optimization_level": 0}


# The numbers: FP8 loses nothing of them, so that all of a step is known to the last bit.


def rows(rng: np.random.Generator) -> np.ndarray:
    """Rows whose amax, one of `NUMBERS`, differs from step to step."""
    peak = rng.integers(len(NUMBERS))
    magnitudes = NUMBERS[rng.integers(peak + 1, size=(ROWS, WIDTH))]
    magnitudes.flat[rng.integers(ROWS * WIDTH)] = NUMBERS[peak]
    return magnitudes * rng.choice([-1.0, 1.0], size=(ROWS, WIDTH))


def kernels(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Signed permutations, times 1 or 2: every sum of a product has one term."""
    n = math.prod(shape[:-2])
    stack = np.stack([np.eye(WIDTH)[rng.permutation(WIDTH)] for _ in range(n)])
    signs = rng.choice([-1.0, 1.0], size=(n, WIDTH, 1))
    peaks = rng.choice([1.0, 2.0], size=(n, 1, 1))
    return (stack * signs * peaks).reshape(shape).astype(np.float32)


@dataclass(frozen=True)
class Step:
    """One step: what is wrong with its data, if anything, and in which row."""

    flaw: str  # "", or an operand and what is in it: "x inf", "dy nan", "dy zero"
    row: int

    def batch(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        batch = {"x": rows(rng), "dy": rows(rng)}
        if self.flaw:
            name, value = self.flaw.split()
            if value == "zero":
                batch[name][:] = 0.0
            else:
                batch[name][self.row, 3] = float(value)
        return {name: value.astype(np.float32) for name, value in batch.items()}


flaws = st.sampled_from(["", "", "", "x inf", "dy inf", "dy nan", "x zero", "dy zero"])
step = st.builds(Step, flaws, st.integers(0, ROWS - 1))
steps = st.lists(step, min_size=2, max_size=6)

# 2^5 of headroom: kernels double or halve from step to step, and histories remember.
recipes = st.builds(
    partial(jfp8.recipes.DelayedScaling, margin=5, scale_rounding="power_of_two"),
    fp8_format=st.sampled_from(["HYBRID", "E4M3", "E5M2"]),
    amax_history_len=st.sampled_from([1, 2, 3, 16]),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
)


# How a step is computed: whole, in parts one after the other, on devices.


def loss_fn(model: nn.Module):
    return lambda variables, batch: (jnp.sum(model.apply(variables, batch["x"]) * batch["dy"]), {})


def in_parts(batch, parts):
    return jax.tree.map(lambda a: a.reshape(parts, -1, WIDTH), batch)


def micro_batches(loss, parts):
    return jfp8.value_and_grad(loss, micro_batches=parts)


def accumulated(loss, parts):
    def compute(state, batch):
        each = lax.map(lambda b: jfp8.value_and_grad(loss)(state, b), in_parts(batch, parts))
        return jax.tree.map(lambda a: jnp.mean(a, axis=0), each)

    return compute


def averaged(loss, parts):
    """As under ``pmap``: whole gradients are averaged over an axis."""

    def compute(state, batch):
        one = lambda b: lax.pmean(jfp8.value_and_grad(loss)(state, b), "d")
        return jax.vmap(one, axis_name="d", out_axes=None)(in_parts(batch, parts))

    return compute


def on_devices(loss, parts, check_vma):
    def compute(state, batch):
        if check_vma:  # differentiate by what varies, or JAX sums by itself
            state = jax.tree.map(lambda leaf: lax.pcast(leaf, "d", to="varying"), state)
        return lax.pmean(jfp8.value_and_grad(loss)(state, batch), "d")

    specs = {"in_specs": (PartitionSpec(), PartitionSpec("d")), "out_specs": PartitionSpec()}
    return jax.shard_map(compute, mesh=mesh_of(parts), check_vma=check_vma, **specs)


def mesh_of(*sizes):
    names = ("d", "m")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def as_it_is(state, parts, rng):
    """No shardings."""
    return None, None


def over_devices(state, parts, rng):
    """A copy of the state for each device, and a part of the batch."""
    named = partial(NamedSharding, mesh_of(parts))
    return jax.tree.map(lambda _: named(PartitionSpec()), state), named(PartitionSpec("d"))


def anyhow(state, parts, rng):
    """All arrays of the state cut over 8 devices at random, and the batch along its rows."""
    mesh = mesh_of(*[(1, 8), (2, 4), (8, 1)][rng.integers(3)])

    def sharding(leaf):
        dims = [[] for _ in leaf.shape]
        left = list(leaf.shape)
        for name in mesh.axis_names:
            d = rng.integers(-1, leaf.ndim)  # -1: not over this axis
            if d >= 0 and left[d] % mesh.shape[name] == 0:
                left[d] //= mesh.shape[name]
                dims[d].append(name)
        return NamedSharding(mesh, PartitionSpec(*[tuple(names) or None for names in dims]))

    return jax.tree.map(sharding, state), NamedSharding(mesh, PartitionSpec(("d", "m")))


@dataclass(frozen=True)
class Way:
    """How a step is computed, and where its arrays are.

    Attributes:
      compute: ``(loss_fn, parts)`` -> a function ``(state, batch)`` -> ``(loss, Gradients)``, which
        are means over parts.
      parts: into how many parts it may split the batch.
      exact: whether a layer that is used once in each part has its exact amax.
      shardings: ``(state, parts, rng)`` -> those of state and batch.
    """

    compute: Callable
    parts: tuple[int, ...]
    exact: bool
    shardings: Callable = as_it_is


WAYS = {
    "whole": Way(micro_batches, (1,), True),
    "micro-batches": Way(micro_batches, (2, 4), True),
    "accumulated by hand": Way(accumulated, (2, 4), False),
    "averaged over an axis": Way(averaged, (2, 4), False),
    "shard_map": Way(partial(on_devices, check_vma=True), (2, 4), False, over_devices),
    "shard_map, unchecked": Way(partial(on_devices, check_vma=False), (2, 4), False, over_devices),
    "sharded": Way(micro_batches, (1,), True, anyhow),
    "sharded micro-batches": Way(micro_batches, (2,), True, anyhow),
}
ways = st.sampled_from([(name, n) for name, way in WAYS.items() for n in way.parts])


def breathe(_, params):
    """An optimizer whose steps are known exactly: kernels change sign, and double or halve."""
    factor = lambda p: jnp.where(jnp.max(jnp.abs(p)) > 1, -1.5, -3.0)
    return jax.tree.map(lambda p: factor(p) * p, params)


def breathed(p: np.ndarray) -> np.ndarray:
    return p * (-0.5 if np.max(np.abs(p)) > 1 else -2.0)


def optimizer(growth_interval: int) -> optax.GradientTransformation:
    """With a state of its own, whose every bit is known as well."""
    return optax.chain(
        jfp8.loss_scale(init_scale=2.0**6, growth_interval=growth_interval, min_scale=2.0**5),
        optax.trace(0.5),
        optax.stateless(breathe),
    )


@dataclass(frozen=True)
class Seen:
    """What a step of a program is by NumPy: losses and uses of each part."""

    losses: list[float]
    parts: list[dict[Place, Uses]]

    @property
    def overflow(self) -> bool:
        return not np.isfinite(self.losses).all() or any(map(overflowed, self.parts))


def seen_by_numpy(program: Program, kernel: Callable, batch, parts: int) -> Seen:
    """`program` run by NumPy on each part of the batch, with the `kernel` of each place."""
    weights = lambda place: kernel(place).astype(np.float64)
    losses, uses = [], []
    for x, dy in zip(np.split(batch["x"], parts), np.split(batch["dy"], parts)):
        seen = defaultdict(Uses)
        with np.errstate(invalid="ignore"):
            y, pullback = program.run(x.astype(np.float64), Place(), weights, seen)
            pullback(dy.astype(np.float64))
            losses.append(np.sum(y * dy))
        uses.append(seen)
    return Seen(losses, uses)


def assert_entry(before, after, amaxes, *, exact, where, ratio=1.0):
    """`after` is `before` with the largest of `amaxes` in front; times `ratio`, a power of two."""
    largest = np.float32(max(amaxes))
    if largest == 0:
        np.testing.assert_array_equal(after, before * ratio, err_msg=where)
        return
    np.testing.assert_array_equal(after[1:], before[:-1] * ratio, err_msg=where)
    # An amax is not below the true one, or what that keeps would saturate.
    newest = after[0] / ratio / largest
    below = EXACT if exact else EXACT + AVERAGED * np.sqrt(len(amaxes) - 1)
    assert 1 - below <= newest <= (1 + EXACT if exact else BIN), (where, newest, amaxes)


def layout(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)


@dataclass
class LossScale:
    """The rule of dynamic loss scaling, in Python."""

    interval: int
    value: float = 2.0**6
    tracker: int = 0

    def moved(self, overflow: bool) -> LossScale:
        if overflow:
            return LossScale(self.interval, max(self.value / 2, 2.0**5))
        if self.tracker + 1 == self.interval:
            return LossScale(self.interval, self.value * 2)
        return LossScale(self.interval, self.value, self.tracker + 1)


def check_step(program, states, results, batch, scale, *, parts, exact):
    """One step of a `TrainState`, all of it, against the oracle; returns the next loss scale."""
    (before, after), (loss, gradient) = states, results
    seen = seen_by_numpy(program, partial(leaf, before.params), batch, parts)
    next_scale = scale.moved(seen.overflow)
    ratio = np.float32(next_scale.value / scale.value)
    (_, new_scale), (trace, new_trace), _ = zip(before.opt_state, after.opt_state)
    assert new_scale.loss_scale == next_scale.value
    assert new_scale.grads_finite == (not seen.overflow)
    assert after.step == before.step + 1
    for place in seen.parts[0]:
        kernel, new_kernel = (leaf(s.params, place) for s in (before, after))
        moment, new_moment = (leaf(t.trace, place) for t in (trace, new_trace))
        whole = leaf(before.params, Place(place.path))
        if seen.overflow:
            np.testing.assert_array_equal(new_kernel, kernel)
            np.testing.assert_array_equal(new_moment, moment)
        else:
            dw = np.mean([part[place].gradient for part in seen.parts], axis=0)
            np.testing.assert_array_equal(leaf(gradient, place), dw)
            np.testing.assert_array_equal(new_moment, np.float32(dw) + moment / 2)
            np.testing.assert_array_equal(new_kernel, breathed(whole)[place.index])
        for role in ("lhs", "rhs", "grad"):
            state, new_state = (
                {
                    name: leaf(fp8, place, ("DotGeneral_0", role, name))
                    for name in ("amax_history", "amax")
                }
                for fp8 in (before.fp8, after.fp8)
            )
            assert new_state["amax"] == 0
            per_part = [part[place].amaxes[role] for part in seen.parts]
            amaxes = [amax for part in per_part for amax in part]
            unit = scale.value if role == "grad" else 1.0
            assert_entry(
                state["amax_history"],
                new_state["amax_history"],
                [0.0] if seen.overflow else [amax * unit for amax in amaxes],
                exact=exact and max(map(len, per_part)) == 1,
                where=f"{role} at {place}",
                ratio=ratio if role == "grad" else 1.0,
            )
    if not seen.overflow:
        np.testing.assert_array_equal(loss, np.mean(seen.losses))
    return next_scale


def create(program, recipe, tx, rng):
    """A state with exact kernels, and its model; the parameters are those of the stock layers."""
    stock = program.linen(partial(nn.Dense, WIDTH, use_bias=False))
    model = program.linen(partial(jfp8.Dense, WIDTH, use_bias=False, recipe=recipe))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    key = jax.random.key(0)
    shapes = jax.eval_shape(model.init, key, x)
    assert shapes["params"] == jax.eval_shape(stock.init, key, x)["params"]
    variables = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    variables["params"] = jax.tree.map(
        lambda a: jnp.asarray(kernels(a.shape, rng)), shapes["params"]
    )
    return model, jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


@some_programs
@given(
    program=programs(),
    recipe=recipes,
    way=ways,
    steps=steps,
    growth_interval=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
)
def test_every_step_of_any_program_is_known_to_the_last_bit(
    program, recipe, way, steps, growth_interval, seed
):
    """Loss, gradients, parameters, moments, loss scale and histories, in one trace."""
    (name, parts), rng, traces = way, np.random.default_rng(seed), []
    way = WAYS[name]
    # Flax traces the body of a shared scan as if nothing varied over devices; a scan in it objects.
    assume(name != "shard_map" or not scans_in_shared_scan(program))
    model, state = create(program, recipe, optimizer(growth_interval), rng)
    compute = way.compute(loss_fn(model), parts)
    of_state, of_batch = way.shardings(state, parts, rng)

    @partial(jax.jit, out_shardings=(of_state, None, None), compiler_options=QUICKLY)
    def train_step(state, batch):
        traces.append(None)
        loss, grads = compute(state, batch)
        return state.apply_gradients(grads), loss, grads.params

    state = jax.device_put(state, of_state)
    scale = LossScale(growth_interval)
    for step in steps:
        batch = step.batch(rng)
        before = jax.device_get(state)
        state, loss, gradient = train_step(state, jax.device_put(batch, of_batch))
        after = jax.device_get(state)
        assert layout(after) == layout(before)
        scale = check_step(
            program, (before, after), (loss, gradient), batch, scale, parts=parts, exact=way.exact
        )
    assert len(traces) == 1
