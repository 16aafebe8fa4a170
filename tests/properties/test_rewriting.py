"""Random programs, and the same programs written in another way: the same bits.

A scan is a loop, a vmap is a loop over groups of rows, remat and jit change nothing: whatever the
numbers are, and whatever the recipe. Only where a gradient is a sum over several uses of a layer
may its terms be added in another order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jfp8
from support.random_programs import (
    ROWS,
    WIDTH,
    Chain,
    Layer,
    Place,
    Program,
    Relu,
    Remat,
    Repeat,
    Scan,
    Uses,
    Vmap,
    programs,
    run_in_turn,
)

pytestmark = pytest.mark.property

# Every example compiles two programs.
few_programs = settings(max_examples=max(settings.default.max_examples // 6, 1))

STEPS = 2


# The other ways to write the same.


@dataclass(frozen=True)
class Unrolled(Program):
    """A scan over layers with weights of their own, as a loop."""

    part: Program
    length: int

    def linen(self, layer):
        return InTurn([self.part.linen(layer) for _ in range(self.length)])

    def run(self, x, at, weights, seen):
        places = [at.inside(f"parts_{i}") for i in range(self.length)]
        return run_in_turn([(self.part, place) for place in places], x, weights, seen)


@dataclass(frozen=True)
class Grouped(Program):
    """A vmap over groups of rows with weights of their own, as a loop."""

    part: Program
    groups: int

    def linen(self, layer):
        return ByGroup([self.part.linen(layer) for _ in range(self.groups)])

    def run(self, x, at, weights, seen):
        done = [
            self.part.run(rows, at.inside(f"parts_{i}"), weights, seen)
            for i, rows in enumerate(np.split(x, self.groups))
        ]
        return np.concatenate([y for y, _ in done]), None


class InTurn(nn.Module):
    parts: list[nn.Module]

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class ByGroup(nn.Module):
    parts: list[nn.Module]

    def __call__(self, x):
        groups = jnp.split(x, len(self.parts))
        return jnp.concatenate([part(rows) for part, rows in zip(self.parts, groups)])


def rewritten(program: Program) -> Program:
    """`program` without remat, scan and vmap, but for a vmap that shares its weights."""
    match program:
        case Chain(parts):
            return Chain(tuple(map(rewritten, parts)))
        case Remat(part):
            return rewritten(part)
        case Repeat(part, times) | Scan(part, times, True):
            return Repeat(rewritten(part), times)
        case Scan(part, length, False):
            return Unrolled(rewritten(part), length)
        case Vmap(part, groups, False):
            return Grouped(rewritten(part), groups)
        case Vmap(part, groups, True):
            return Vmap(rewritten(part), groups, True)
        case Layer() | Relu():
            return program
    raise TypeError(program)


# Running them.

named_recipes = st.sampled_from(
    [
        jfp8.recipes.DelayedScaling(),
        jfp8.recipes.DelayedScaling(amax_history_len=2, margin=1, fp8_format="E4M3"),
        jfp8.recipes.DelayedScaling(amax_compute_algo="most_recent", scale_rounding="power_of_two"),
        jfp8.recipes.Float8CurrentScaling(),
        jfp8.recipes.RowwiseScaling(),
        jfp8.recipes.MXFP8BlockScaling(),
        jfp8.recipes.Hybrid(),
    ]
)


def uses_of(program: Program) -> dict[Place, int]:
    """How often the layer at each place is used; the places in the order of their first use."""
    uses: Counter[Place] = Counter()

    def weights(place):
        uses[place] += 1
        return np.eye(WIDTH)

    program.run(np.ones((ROWS, WIDTH)), Place(), weights, defaultdict(Uses))
    return uses


def leaf(tree, place: Place, *names: str) -> np.ndarray:
    for name in (*place.path, *names):
        tree = tree[name]
    return np.asarray(tree)[place.index]


def create(program: Program, recipe, rng) -> tuple[nn.Module, jfp8.TrainState]:
    """Its state, with normal weights, drawn in the order in which the layers are used."""
    model = program.linen(partial(jfp8.Dense, WIDTH, use_bias=False, recipe=recipe))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    for place in uses_of(program):
        node = variables["params"]
        for name in place.path:
            node = node[name]
        node["kernel"][place.index] = rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)
    tx = optax.chain(jfp8.loss_scale(init_scale=2.0**4), optax.sgd(2.0**-6))
    return model, jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def normal_batches(rng) -> list[dict[str, np.ndarray]]:
    return [
        {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "dy")}
        for _ in range(STEPS)
    ]


def train_step(model, state, batch):
    def loss_fn(variables, batch):
        y = model.apply(variables, batch["x"])
        return jnp.sum(y * batch["dy"]), {}, y

    (_, y), grads = jfp8.value_and_grad(loss_fn, has_aux=True)(state, batch)
    return state.apply_gradients(grads), y, grads.params


def run(program, recipe, seed, wrap=jax.jit):
    """What two steps leave behind."""
    rng = np.random.default_rng(seed)
    model, state = create(program, recipe, rng)
    step = wrap(partial(train_step, model))
    results = []
    for batch in normal_batches(rng):
        state, y, gradient = step(state, batch)
        results.append(jax.device_get((state.fp8, state.params, y, gradient)))
    return results


ROLES = ("lhs", "rhs", "grad")


def assert_close(given, expected):
    """But for the order of a few additions in f32."""
    np.testing.assert_allclose(given, expected, rtol=0, atol=2e-6 * np.max(np.abs(expected)))


@few_programs
@given(program=programs(), recipe=named_recipes, seed=st.integers(0, 1 << 32))
def test_a_program_and_its_loops_are_the_same(program, recipe, seed):
    """Outputs, gradients, parameters and histories; with one use of each layer, bit for bit."""
    other = rewritten(program)
    uses, other_uses = uses_of(program), uses_of(other)
    assert list(uses.values()) == list(other_uses.values())
    results = list(zip(run(program, recipe, seed), run(other, recipe, seed)))
    once = set(uses.values()) == {1}
    if not once:  # the second step begins with parameters that may differ in their last bit
        del results[1:]
    same = np.testing.assert_array_equal if once else assert_close
    for (fp8, params, y, gradient), (other_fp8, other_params, other_y, other_gradient) in results:
        assert np.max(np.abs(y)) > 0
        np.testing.assert_array_equal(y, other_y)
        for place, there in zip(uses, other_uses):
            same(leaf(gradient, place, "kernel"), leaf(other_gradient, there, "kernel"))
            same(leaf(params, place, "kernel"), leaf(other_params, there, "kernel"))
            for role in ROLES if fp8 else ():
                names = ("DotGeneral_0", role, "amax_history")
                same(leaf(fp8, place, *names), leaf(other_fp8, there, *names))


@pytest.mark.slow
@few_programs
@given(program=programs(deepest=2), recipe=named_recipes, seed=st.integers(0, 1 << 32))
def test_jit_changes_nothing(program, recipe, seed):
    """One operation after the other gives the bits that XLA gives who sees them all.

    With one use of each layer: XLA may add the gradients of several uses in another order.
    """
    jitted = run(program, recipe, seed)
    eager = run(program, recipe, seed, wrap=lambda f: f)
    assert np.max(np.abs(jitted[0][2])) > 0
    assert jax.tree.structure(jitted) == jax.tree.structure(eager)
    once = set(uses_of(program).values()) == {1}
    if not once:  # the second step begins with parameters that may differ in their last bit
        del jitted[1:], eager[1:]
    jax.tree.map(np.testing.assert_array_equal if once else assert_close, jitted, eager)
