"""What people do to whole trees: states and gradients are averaged, scaled, cast and added up."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same
from support.recorded import recorded

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 16))
Y = jax.random.normal(jax.random.key(1), (32, 8))
MODEL = nn.Sequential([jfp8.Dense(64), nn.relu, jfp8.Dense(8)])
apply = jax.jit(MODEL.apply)


def squared_error(variables, x, y):
    return jnp.mean((MODEL.apply(variables, x) - y) ** 2)


@jax.jit
def train(state):
    _, grads = jfp8.value_and_grad(squared_error)(state, X, Y)
    return state.apply_gradients(grads)


def after(*steps: int) -> list[dict]:
    """The variables after these numbers of steps, which change a lot between them."""
    variables = jax.jit(MODEL.init)(KEY, X)
    state = jfp8.TrainState.create(apply_fn=MODEL.apply, variables=variables, tx=optax.adam(0.05))
    found = []
    for step in range(1, max(steps) + 1):
        state = train(state)
        if step in steps:
            found.append(state.variables)
    return found


def averaged(decay: float, trees: list) -> dict:
    average = jax.tree.map(jnp.zeros_like, trees[0])
    for tree in trees:
        average = jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, average, tree)
    return average


TREES = {
    "EMA from zeros": lambda trees: averaged(0.99, trees),
    "mean": lambda trees: jax.tree.map(lambda a, b: (a + b) / 2, trees[0], trees[2]),
    "scaled": lambda trees: jax.tree.map(lambda a: a / 8, trees[2]),
    "negative": lambda trees: jax.tree.map(jnp.negative, trees[2]),
    "bf16": lambda trees: jax.tree.map(lambda a: a.astype(jnp.bfloat16), trees[2]),
}


@pytest.fixture(scope="module")
def trees():
    return after(1, 5, 20)


@pytest.mark.slow
def test_histories_that_arithmetic_has_changed_are_not_used(trees):
    """The result is that of the parameters alone, whose scales follow from the data."""
    for name, change in TREES.items():
        tree = change(trees)
        expected = apply({"params": tree["params"]}, X)
        assert_same(apply(tree, X), expected)
        # Without the check they would be used, and wrong.
        unchecked = jax.tree.map(lambda x: x, tree)
        for layer in unchecked["fp8"].values():
            del layer["DotGeneral_0"]["check"]
        if name != "negative":
            assert np.any(apply(unchecked, X) != expected), name


def test_histories_that_nothing_has_changed_are_used(trees):
    delayed, current = apply(trees[2], X), apply({"params": trees[2]["params"]}, X)
    assert np.any(delayed != current)
    for same in (
        jax.tree.map(lambda a: (a + a) / 2, trees[2]),
        jax.tree.map(lambda a: jnp.stack([a, a])[1], trees[2]),
        jax.tree.map(np.asarray, trees[2]),
    ):
        assert_same(apply(same, X), delayed)


def test_a_training_step_reads_no_histories_that_arithmetic_has_changed(trees):
    """A state that has not begun gives the same loss."""
    state = jfp8.TrainState.create(apply_fn=MODEL.apply, variables=trees[2], tx=optax.sgd(0.0))

    @jax.jit
    def loss(fp8):
        mean_square = lambda variables: jnp.mean(MODEL.apply(variables, X) ** 2)
        return jfp8.value_and_grad(mean_square)(state.replace(fp8=fp8))[0]

    changed, empty, same = (
        loss(jax.tree.map(lambda a, by=by: a * by, state.fp8)) for by in (1 / 8, 0, 1)
    )
    assert changed == empty
    assert same != empty


def test_training_goes_on_from_a_mean_of_states(trees):
    """Its histories begin with the amaxes of the first step, and are good again."""
    state = jfp8.TrainState.create(
        apply_fn=MODEL.apply, variables=TREES["mean"](trees), tx=optax.sgd(0.0)
    )
    state = train(state)
    product = state.fp8["layers_0"]["DotGeneral_0"]
    assert product["lhs"]["amax_history"][0] == jnp.max(jnp.abs(X))
    kernel = state.params["layers_0"]["kernel"]
    assert product["rhs"]["amax_history"][0] == jnp.max(jnp.abs(kernel))
    delayed = apply(state.variables, X)
    del product["check"]
    assert_same(apply(state.variables, X), delayed)


def test_histories_that_vmap_has_recorded_may_be_averaged():
    variables = jax.jit(MODEL.init)(KEY, X)
    parts = X.reshape(4, 8, 16) * jnp.array([1.0, 1.0, 1.0, 20.0])[:, None, None]
    collections = {name: variables[name] for name in ("params", "fp8")}

    @jax.jit
    def averaged(parts):
        mutated = jax.vmap(lambda x: recorded(MODEL, collections, x))(parts)
        return jfp8.advance(jax.tree.map(lambda a: a.mean(0), mutated["fp8"]))

    found = apply({**collections, "fp8": averaged(parts)}, 20 * X)
    assert_same(found, apply({"params": variables["params"]}, 20 * X))


class Model(nnx.Module):
    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.first = jfp8.nnx.Linear(16, 64, rngs=rngs)
        self.last = jfp8.nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def test_a_target_network_of_nnx_follows():
    model, target = Model(0), Model(0)
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        _, grads = jfp8.nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(5):
        step(model, optimizer)
        nnx.update(target, optax.incremental_update(nnx.state(model), nnx.state(target), 0.05))
    fresh = Model(1)
    nnx.update(fresh, nnx.state(target, nnx.Param))
    for network in (model, target, fresh):
        network.eval()
    call = nnx.jit(lambda model: model(X))
    assert_same(call(target), call(fresh))
    # Those of the model itself are used.
    nnx.update(fresh, nnx.state(model, nnx.Param))
    assert np.any(call(model) != call(fresh))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(jfp8.Dense(16)(x))
        return jfp8.Dense(8)(nn.relu(x))


NORMALIZED = Normalized()


def loss_fn(variables, x, y):
    out, mutated = NORMALIZED.apply(variables, x, mutable=["batch_stats", "counters"])
    return jnp.mean((out - y) ** 2), mutated


def normalized_state():
    variables = jax.jit(NORMALIZED.init)(KEY, X)
    return jfp8.TrainState.create(apply_fn=NORMALIZED.apply, variables=variables, tx=optax.sgd(0.1))


@jax.jit
def gradients(state, scale=1.0):
    return jfp8.value_and_grad(loss_fn)(state, scale * X, Y)[1]


@jax.jit
def applied(state, grads):
    return state.apply_gradients(grads)


CHANGES = {
    "scaled": lambda g: jax.tree.map(lambda x: 0.3 * x, g),
    "clipped": lambda g: jax.tree.map(lambda x: jnp.clip(x, -1e-3, 1e-3), g),
    "mean of a vmap": lambda g: jax.tree.map(
        lambda x: x.mean(0), jax.vmap(lambda f: jax.tree.map(lambda x: f * x, g))(jnp.ones(3))
    ),
    "summed by a scan": lambda g: jax.lax.scan(
        lambda total, _: (jax.tree.map(jnp.add, total, g), None),
        jax.tree.map(jnp.zeros_like, g),
        length=5,
    )[0],
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.representative(1)
def test_arithmetic_on_gradients_changes_gradients_alone(name):
    state = normalized_state()
    grads = gradients(state)
    changed = jax.jit(CHANGES[name])(grads)
    assert_same(changed.params, jax.jit(CHANGES[name])(grads.params))
    plain, new = applied(state, grads), applied(state, changed)
    assert_same(new.fp8, plain.fp8)
    assert new.collections["counters"]["calls"] == 2  # once by init
    statistics = new.collections["batch_stats"]["BatchNorm_0"]
    for name, expected in plain.collections["batch_stats"]["BatchNorm_0"].items():
        assert np.any(expected != state.collections["batch_stats"]["BatchNorm_0"][name])
        np.testing.assert_allclose(statistics[name], expected, rtol=2**-22)


def test_untouched_gradients_give_collections_to_the_bit():
    state = normalized_state()
    expected = jax.jit(loss_fn)(state.variables, X, Y)[1]
    assert_same(dict(gradients(state).collections), dict(expected))


@pytest.mark.slow
def test_a_norm_of_gradients_is_that_of_the_parameters():
    state = normalized_state()
    of_parts = jax.jit(lambda state: jfp8.value_and_grad(loss_fn, micro_batches=2)(state, X, Y)[1])
    for grads in (gradients(state), of_parts(state)):  # parts have sinks of ones
        norm = optax.tree.norm(grads.params)
        assert_same(optax.tree.norm(grads), norm)
        assert norm > 0.1


def test_a_mean_of_gradients_has_the_mean_of_the_statistics():
    state = normalized_state()
    both = [gradients(state), gradients(state, 3.0)]
    mean = jax.jit(lambda *both: jax.tree.map(lambda a, b: (a + b) / 2, *both))(*both)
    found, first, second = (jax.tree.leaves(g.collections["batch_stats"]) for g in (mean, *both))
    for of_mean, a, b in zip(found, first, second, strict=True):
        np.testing.assert_allclose(of_mean, (a + b) / 2, rtol=2**-21)
        assert np.any(a != b)
    new = applied(state, mean)
    largest = new.fp8["Dense_0"]["DotGeneral_0"]["lhs"]["amax_history"][0]
    assert 1 <= largest / jnp.max(jnp.abs(3 * X)) <= 9 / 8


@pytest.mark.slow
def test_what_is_no_common_factor_is_loud():
    """Noise on statistics makes them NaN; f16, which would lose them, raises."""
    state, noise = normalized_state(), jax.random.normal
    grads = gradients(state)
    for size in (2.0**-65, 1e-3):
        noisy = jax.tree.map(lambda g, s=size: g + s * noise(KEY, g.shape, g.dtype), grads)
        assert np.isnan(noisy.collections["batch_stats"]["BatchNorm_0"]["var"]).all()
    only = dataclasses.replace(grads, params=noisy.params)
    assert_same(dict(only.collections), dict(grads.collections))
    with pytest.raises(TypeError, match=r"float16 cannot hold.*dataclasses\.replace\(grads"):
        state.apply_gradients(jax.tree.map(lambda g: g.astype(jnp.float16), grads))
    nothing = state.apply_gradients(jax.tree.map(lambda g: 0 * g, grads))
    assert_same(nothing.collections, state.collections)
