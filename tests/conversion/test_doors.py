"""One model behind three doors, as a function, in Linen and in NNX: the same bits."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same, relative_error

X = jax.random.normal(jax.random.key(0), (64, 16))
NAMES = ("q", "k", "v", "o")
KEYS = jax.random.split(jax.random.key(1), 4)
PARAMS = {name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip(NAMES, KEYS, strict=True)}


def model_of(multiply, x):
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # not an argument of the model
    q, k, v = (multiply(name, x) for name in "qkv")
    return multiply("o", jnp.tanh(q * k + v))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = {name: nn.Dense(16, use_bias=False, name=name) for name in NAMES}
        return model_of(lambda name, x: layers[name](x), x)


class Nnx(nnx.Module):
    def __init__(self):
        for name in NAMES:
            setattr(self, name, nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)))
            getattr(self, name).kernel[...] = PARAMS[name]

    def __call__(self, x):
        return model_of(lambda name, x: getattr(self, name)(x), x)


def loss_of(y):
    return jnp.sum(jnp.sin(y))


def as_function(recipe):
    function = lambda params, x: model_of(lambda name, x: x @ params[name], x)
    converted = jfp8.convert(function, recipe, exempt=())
    loss = lambda params, state, x: loss_of(converted(params, state, x))

    def step(state, x):
        value, (grads, new) = jax.value_and_grad(loss, argnums=(0, 1))(PARAMS, state, x)
        return value, grads, new

    return step, converted.init(PARAMS, X)


def in_linen(recipe):
    model = jfp8.convert(Linen(), recipe, exempt=())
    params = {name: {"kernel": w} for name, w in PARAMS.items()}
    variables = {**model.init(jax.random.key(0), X), "params": params}
    state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.0))
    loss = lambda variables, x: loss_of(model.apply(variables, x))

    def step(state, x):
        value, grads = jfp8.value_and_grad(loss)(state, x)
        kernels = {name: layer["kernel"] for name, layer in grads.params.items()}
        return value, kernels, state.apply_gradients(grads)

    return step, state


def in_nnx(recipe):
    graph, state = nnx.split(jfp8.convert(Nnx(), recipe, exempt=()))

    def step(state, x):
        model = nnx.merge(graph, state)
        loss = lambda model, x: loss_of(model(x))
        value, grads = jfp8.nnx.value_and_grad(loss)(model, x)
        kernels = {name: grads[name]["kernel"].get_value() for name in NAMES}
        return value, kernels, nnx.state(model)

    return step, state


DOORS = {"function": as_function, "linen": in_linen, "nnx": in_nnx}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_three_doors_give_the_same_bits(recipe):
    found = {}
    for door, made in DOORS.items():
        step, state = made(recipe)
        compiled = jax.jit(step)
        results = []
        for scale in (1.0, 4.0, 0.5):  # the second step is clipped by the history of the first
            value, grads, state = compiled(state, scale * X)
            results.append((value, grads))
        found[door] = results
    plain = jax.grad(lambda p: loss_of(model_of(lambda name, x: x @ p[name], X)))(PARAMS)
    assert np.abs(found["function"][0][1]["q"] - plain["q"]).max() > 0
    for door in ("linen", "nnx"):
        assert_same(found[door], found["function"])


@pytest.mark.parametrize("door", DOORS)
def test_layers_with_one_input_quantize_it_once(door):
    step, state = DOORS[door]("delayed")
    program = jax.jit(step).lower(state, X).compile().as_text()
    made = set(re.findall(r"%(\S+) = f8e4m3fn\[64,16\]", program))
    assert len(made) == 2, made  # x, and what goes into the last layer


def test_inputs_of_one_shape_have_scales_of_their_own():
    """The second is a hundred times larger than the first, whose history would clip it."""
    function = lambda p, x: (100 * jnp.tanh(x @ p["q"])) @ p["k"]
    converted = jfp8.convert(function, "delayed", exempt=())
    loss = lambda p, state, x: jnp.sum(converted(p, state, x) ** 2)
    state = converted.init(PARAMS, X)
    for _ in range(2):
        error = relative_error(converted(PARAMS, state, X), function(PARAMS, X))
        assert 0 < error < 0.06  # roundings of up to 2^-4
        state = jax.grad(loss, argnums=1)(PARAMS, state, X)
