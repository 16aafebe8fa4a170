"""Steps that are skipped are counted, and said where a state is read."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same

X = jnp.ones((2, 4))


class NormOfBias(nn.Module):
    """The gradient of the norm of zeros is NaN, while the loss is finite."""

    @nn.compact
    def __call__(self, x):
        return jfp8.Dense(3)(x)


def loss_fn(apply, broken, variables, x):
    bias = variables["params"]["Dense_0"]["bias"]
    return jnp.mean(apply(variables, x) ** 2) + (jnp.linalg.norm(bias) if broken else 0.0), {}


@pytest.fixture(scope="module")
def run():
    """A state, and a compiled step that is skipped where its last argument is True."""
    model = NormOfBias()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.adam(0.1))

    @partial(jax.jit, static_argnums=1)
    def step(state, broken):
        _, grads = jfp8.value_and_grad(partial(loss_fn, model.apply, broken))(state, X)
        return state.apply_gradients(grads), grads

    return state, step


def test_a_gradient_that_is_nan_is_counted_and_named(run):
    state, step = run
    bad, grads = step(state, True)
    assert grads.not_finite() == ["params/Dense_0/bias"]
    assert (int(bad.step), int(bad.skipped_steps), int(bad.skipped_in_a_row)) == (1, 1, 1)
    assert "skipped_steps=1 (the last 1 in a row)" in repr(bad)
    assert "skipped" not in repr(state)
    rest = ("params", "fp8", "opt_state")
    assert_same([getattr(bad, name) for name in rest], [getattr(state, name) for name in rest])
    after, grads = step(bad, False)
    assert (int(after.skipped_steps), int(after.skipped_in_a_row)) == (1, 0)
    assert grads.not_finite() == []


def test_an_operand_that_is_not_finite_is_named(run):
    state, _ = run
    compute = jax.jit(jfp8.value_and_grad(partial(loss_fn, state.apply_fn, False)))
    _, grads = compute(state, X * jnp.inf)
    assert "fp8_sink/Dense_0/DotGeneral_0" in grads.not_finite()


def test_ten_skipped_steps_in_a_row_are_said_once_a_state_is_read(run, tmp_path):
    state, step = run
    for _ in range(9):
        state, _ = step(state, True)
    state.variables  # noqa: B018
    state, _ = step(state, True)
    message = "last 10 steps were skipped.*grads.not_finite"
    with pytest.warns(UserWarning, match=message):
        state.variables  # noqa: B018
    with pytest.warns(UserWarning, match=message):
        jfp8.checkpoint.save(tmp_path / "state.safetensors", state)


def test_ten_skipped_steps_in_a_row_are_said_at_the_end_of_a_step_outside_jit(run, tmp_path):
    state, step = run
    grads = step(state, True)[1]
    model = jfp8.nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = jfp8.nnx.Optimizer(model, optax.sgd(0.1))
    bad = jax.tree.map(lambda p: p * jnp.nan, nnx.state(model, nnx.Param))
    for _ in range(9):
        state = state.apply_gradients(grads)
        optimizer.update(model, bad)
    save = lambda: jfp8.checkpoint.save(tmp_path / "all.safetensors", nnx.state((model, optimizer)))
    calls = lambda: state.apply_gradients(grads), lambda: optimizer.update(model, bad), save
    for call in calls:
        with pytest.warns(UserWarning, match="last 10 steps were skipped") as told:
            call()
        assert [w.filename for w in told] == [__file__]


def test_a_loss_scale_at_its_least_value_is_said(run, tmp_path):
    """One that falls to it; a constant one is where it was meant to be."""
    start, _ = run
    for how, least in (({"init_scale": 4.0}, 1), ({"init_scale": 1.0}, None)):
        tx = optax.chain(jfp8.loss_scale(**how), optax.sgd(0.1))
        variables = start.variables
        state = jfp8.TrainState.create(apply_fn=start.apply_fn, variables=variables, tx=tx)
        step = jax.jit(
            lambda state: state.apply_gradients(
                jfp8.value_and_grad(partial(loss_fn, start.apply_fn, True))(state, X)[1]
            )
        )
        state = step(state)
        assert "least" not in repr(state)
        state.variables  # noqa: B018
        state = step(state)
        assert ("loss scale 1, its least value" in repr(state)) == (least is not None)
        if least is None:
            state.variables  # noqa: B018
            continue
        reads = (
            lambda state=state: state.variables,
            lambda state=state: jfp8.metrics(state),
            lambda state=state: jfp8.checkpoint.save(tmp_path / "state.safetensors", state),
        )
        for read in reads:
            with pytest.warns(UserWarning, match="least value, 1: .*min_scale=") as told:
                read()
            assert [w.filename for w in told] == [__file__]


def test_histories_that_stay_empty_are_said(run):
    state, step = run
    after, _ = step(state, False)
    assert "all empty" not in repr(after) + repr(state)
    assert "of 16 steps, all empty: scales are current)" in repr(after.replace(fp8=state.fp8))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_loss_that_is_not_finite_is_a_skipped_step(run, bad):
    """Its gradients are finite, and it counts in no norm of them."""
    state, _ = run
    loss_fn = lambda variables, x: (jnp.mean(state.apply_fn(variables, x)) + bad, {})
    loss, grads = jax.jit(jfp8.value_and_grad(loss_fn))(state, X)
    assert not jnp.isfinite(loss)
    assert grads.not_finite() == ["loss"]
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads.params))
    skipped = state.apply_gradients(grads)
    assert int(skipped.skipped_steps) == 1
    assert_same([skipped.params, skipped.fp8], [state.params, state.fp8])

    large = lambda variables, x: (jnp.mean(state.apply_fn(variables, x)) + 3e38, {})
    grads = jax.jit(jfp8.value_and_grad(large))(state, X)[1]
    assert grads.not_finite() == []
    assert int(state.apply_gradients(grads).skipped_steps) == 0

    model = jfp8.nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = jfp8.nnx.Optimizer(model, optax.sgd(0.1))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    gradient = jfp8.nnx.value_and_grad(lambda model: jnp.mean(model(X)) + bad)
    _, grads = nnx.jit(gradient)(model)
    optimizer.update(model, grads)
    assert int(optimizer.skipped_steps[...]) == 1
    assert_same(nnx.state(model), before)
