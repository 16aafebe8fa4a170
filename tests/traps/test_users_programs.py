"""Programs around a training step, against float32; histories against NumPy."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState

import jfp8
from support.arrays import assert_same, normal

X, Y = normal((32, 16)), jnp.tanh(normal((32, 8), seed=1))
KEY, TX = jax.random.key(0), optax.adam(1e-2)
AMAX = np.abs(X).max()


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="first")(x))
        return nn.Dense(8, name="last")(x)


STOCK = Network()
MODEL = jfp8.convert(STOCK, "delayed", exempt=())
VARIABLES = jax.jit(MODEL.init)(KEY, X)
PARAMS = VARIABLES["params"]


def loss_fn(variables: Any, x: Any = X, y: Any = Y, model: Any = MODEL) -> jax.Array:
    return jnp.mean((model.apply(variables, x) - y) ** 2)


def exact_loss(params: Any, x: Any = X, y: Any = Y) -> jax.Array:
    return loss_fn({"params": params}, x, y, STOCK)


def new(tx: optax.GradientTransformation = TX, params: Any = PARAMS) -> jfp8.TrainState:
    variables = {**VARIABLES, "params": params}
    return jfp8.TrainState.create(apply_fn=MODEL.apply, variables=variables, tx=tx)


def step(state: jfp8.TrainState, loss: Any = loss_fn) -> tuple[jfp8.TrainState, jax.Array]:
    value, grads = jfp8.value_and_grad(loss)(state)
    return state.apply_gradients(grads), value


def losses_of(step: Any, state: Any, n: int = 5) -> tuple[Any, list[float]]:
    losses, step = [], jax.jit(step)
    for _ in range(n):
        state, loss = step(state)
        losses.append(float(loss))
    return state, losses


def exact_losses(loss: Any = exact_loss, tx: Any = TX, params: Any = PARAMS, n: int = 5) -> Any:
    """The losses of `n` steps of float32."""

    def step(carry):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return losses_of(step, (params, tx.init(params)), n)[1]


def history(fp8: Any, layer: str, role: str) -> np.ndarray:
    return np.asarray(fp8[layer]["DotGeneral_0"][role]["amax_history"])


def check(state: jfp8.TrainState, losses: Any, expected: Any, n: int = 5) -> None:
    """The losses, and `n` entries of the input's history, each within [1, 9/8) of the largest."""
    np.testing.assert_allclose(losses, expected, rtol=0.1)
    assert losses[-1] < 0.9 * losses[0]
    entries = history(state.fp8, "first", "lhs") / AMAX
    assert np.all((entries[:n] >= 1 - 1e-6) & (entries[:n] < 9 / 8))
    assert not np.any(entries[n:])


@pytest.mark.slow
def test_a_population_whose_winners_are_copied():
    variables = jax.vmap(lambda key: MODEL.init(key, X))(jax.random.split(KEY, 3))
    states = jax.vmap(lambda v: new().replace(params=v["params"]))(variables)
    of = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)

    def train(states):
        states, losses = jax.vmap(step)(states)
        return states, losses[1]

    states, losses = losses_of(train, states, 3)
    params = of(variables["params"], 1)
    alone, _ = losses_of(step, new(params=params), 3)
    check(alone, losses, exact_losses(params=params, n=3), 3)
    for role in ("lhs", "rhs", "grad"):
        found = history(of(states.fp8, 1), "last", role)
        np.testing.assert_allclose(found, history(alone.fp8, "last", role), rtol=2e-2)
    copied, _ = jax.jit(jax.vmap(step))(of(states, np.array([1, 1, 2])))
    assert_same(of(copied, 0), of(copied, 1))


def test_gradients_that_a_scan_accumulates_from_zeros():
    parts = X.reshape(4, 8, -1), Y.reshape(4, 8, -1)

    def train(state):
        gradient = lambda x, y: jfp8.value_and_grad(loss_fn)(state, x, y)[::-1]
        shapes = jax.eval_shape(gradient, X, Y)[0]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total, part):
            grads, loss = gradient(*part)
            return jax.tree.map(lambda a, b: a + b / 4, total, grads), loss

        grads, losses = jax.lax.scan(add, zeros, parts)
        return state.apply_gradients(grads), jnp.mean(losses)

    check(*losses_of(train, new()), exact_losses())


@pytest.mark.slow
def test_an_inner_gradient_step():
    """First-order MAML: the inner gradient is a constant of the outer one."""

    def adapted(loss, params):
        grads = jax.grad(loss)(jax.lax.stop_gradient(params))
        move = lambda p, g: p - 0.1 * jax.lax.stop_gradient(g)
        return jax.tree.map(move, params, grads)

    def outer(variables):
        stopped = jax.lax.stop_gradient(variables)
        del stopped["fp8_sink"]  # the inner gradient is not recorded
        inner = lambda params: loss_fn({**stopped, "params": params})
        return loss_fn({**variables, "params": adapted(inner, variables["params"])})

    exact = lambda params: exact_loss(adapted(exact_loss, params))
    state, losses = losses_of(functools.partial(step, loss=outer), new())
    check(state, losses, exact_losses(exact))
    first = adapted(exact_loss, PARAMS)["first"]["kernel"]
    found = history(state.fp8, "first", "rhs")[4]
    np.testing.assert_allclose(found, np.max(np.abs(first)), rtol=0.01)


def test_adapters_that_are_merged_into_frozen_weights():
    """LoRA by hand; the amax of a weight is that of what the layer multiplies by."""
    kernel = PARAMS["first"]["kernel"]
    params = {"a": normal((16, 2), seed=2), "b": 0.3 * normal((2, 32), seed=3)}
    kernel_of = lambda params: kernel + params["a"] @ params["b"]
    merged = lambda p: {**PARAMS, "first": {**PARAMS["first"], "kernel": kernel_of(p)}}
    loss = lambda v: loss_fn({**v, "params": merged(v["params"])})
    state, losses = losses_of(functools.partial(step, loss=loss), new(params=params))
    check(state, losses, exact_losses(lambda p: exact_loss(merged(p)), params=params))
    largest = np.abs(np.asarray(kernel) + np.asarray(params["a"]) @ params["b"]).max()
    np.testing.assert_allclose(history(state.fp8, "first", "rhs")[4], largest, rtol=1e-6)


@pytest.mark.parametrize("change", [lambda g: jnp.clip(g, -1e-3, 1e-3), jnp.nan_to_num])
@pytest.mark.slow
def test_gradients_that_are_changed_one_by_one_in_the_state_of_flax(change):
    """The gradient of ``_overwrite_with_gradient``, the next state, is changed like the others."""
    where = "_overwrite_with_gradient"
    model = jfp8.convert(STOCK, "delayed", exempt=(), state_collection=where)
    params = model.init(KEY, X)
    state = FlaxState.create(apply_fn=model.apply, params=params, tx=TX)

    def train(state):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, model=model))(state.params)
        return state.apply_gradients(grads=jax.tree.map(change, grads)), loss

    state, losses = losses_of(train, state)
    tx = optax.chain(optax.stateless(lambda g, _: jax.tree.map(change, g)), TX)
    np.testing.assert_allclose(losses, exact_losses(tx=tx), rtol=0.1)
    found = history(jfp8.linen.histories_in(state.params[where]), "first", "lhs")
    np.testing.assert_allclose(found[:5], AMAX, rtol=1e-6)


@pytest.mark.slow
def test_layers_that_nnx_vmap_makes_and_nnx_scan_runs():
    """Each layer has histories of its own; those of weights are known to NumPy."""

    class Stack(nnx.Module):
        def __init__(self, linear, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return linear(16, 16, rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            run = lambda x, layer: x + nnx.tanh(layer(x))
            return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    def losses(model, value_and_grad):
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

        @nnx.jit
        def train(model, optimizer):
            loss = lambda model: jnp.mean((model(X)[:, :8] - Y) ** 2)
            value, grads = value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        return [float(train(model, optimizer)) for _ in range(4)]

    model, stock = (Stack(linear, nnx.Rngs(0)) for linear in (jfp8.nnx.Linear, nnx.Linear))
    weights = np.asarray(model.layers.kernel[...])
    found = losses(model, jfp8.nnx.value_and_grad)
    np.testing.assert_allclose(found, losses(stock, nnx.value_and_grad), rtol=0.1)
    histories = model.layers.dot_general.histories()
    np.testing.assert_allclose(histories["rhs"][:, 3], np.abs(weights).max((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(histories["lhs"][0, :4], AMAX, rtol=1e-6)
    assert np.all(np.asarray(histories["grad"])[:, :4] > 0)
