"""Layers that have an input in common quantize it once."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import jfp8
import jfp8.nnx
from support.gpu_programs import device_of

ROWS, WIDTH = 24, 16
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


class Attention(nnx.Module):
    """Three layers of one input, the first of which is called in a body."""

    def __init__(self, rngs):
        linear = lambda: nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)
        self.q, self.k, self.v = linear(), linear(), linear()

    def __call__(self, x):
        x = jnp.sin(x)
        # Without prevent_cse: later versions of JAX and Flax would quantize again for the gradient.
        in_a_body = nnx.remat(lambda layer: layer(x), prevent_cse=False)
        return in_a_body(self.q) * self.k(x) + self.v(x)


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = jnp.sin(x)
        q, k, v = (nn.Dense(WIDTH, use_bias=False, name=name)(x) for name in "qkv")
        return q * k + v, None


class Stack(nn.Module):
    """Two in a scan, each with its activations in FP8 kept for the backward pass."""

    @nn.compact
    def __call__(self, x):
        policy = jax.checkpoint_policies.save_only_these_names("fp8_saved")
        layers = nn.scan(
            nn.remat(LinenAttention, policy=policy, prevent_cse=False),
            variable_axes={"params": 0, "fp8": 0, "fp8_sink": 0},
            split_rngs={"params": True},
            length=2,
        )
        return layers(name="layers")(x, None)


def nnx_step():
    graph, state = nnx.split(jfp8.convert(Attention(nnx.Rngs(0)), exempt=()))

    def step(state, x):
        model = nnx.merge(graph, state)
        return jfp8.nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x)

    return step, state


def linen_step():
    model = jfp8.convert(Stack(), exempt=())
    variables = model.init(jax.random.key(0), X)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    loss = lambda variables, x: jnp.sum(model.apply(variables, x)[0] ** 2)
    return jfp8.value_and_grad(loss), state


def times_quantized(step, *args):
    """Count casts to codes in the shape of the input, without fusions, which may cast again."""
    options = {"xla_disable_hlo_passes": "fusion"}
    text = jax.jit(step).lower(*args).compile(compiler_options=options).as_text()
    return len(re.findall(rf"= u8\[{ROWS},{WIDTH}\]\S* convert\(", text))


# Once in each trace: a body's scale exists only inside. Three gradients have the shape, too.
@pytest.mark.parametrize(("make", "times"), [(nnx_step, 2), (linen_step, 1 + 3)])
def test_layers_with_one_input_quantize_it_once(make, times):
    step, state = make()
    assert times_quantized(step, state, X) == times


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_kernels_quantize_an_input_of_three_layers_once(recipe):
    """Devices receive the FP8 results of one kernel, not of three equal ones."""

    class Wide(Attention):
        def __init__(self):
            self.q, self.k, self.v = (nnx.Linear(4096, 4096, rngs=nnx.Rngs(0)) for _ in range(3))

        def __call__(self, x):
            return self.q(x) * self.k(x) + self.v(x)

    def step(state, x):
        model = nnx.merge(graph, state)
        return jfp8.nnx.value_and_grad(lambda model, x: jnp.sum(model(x)))(model, x)

    gpu = AbstractMesh((), (), abstract_device=device_of("h200"))
    with jax.sharding.use_abstract_mesh(gpu):
        graph, state = nnx.split(nnx.eval_shape(lambda: jfp8.convert(Wide(), recipe, exempt=())))
        text = str(jax.make_jaxpr(step)(state, jax.ShapeDtypeStruct((4, 2048, 4096), jnp.float32)))
    assert text.count("name=quantize_both_ways") == 1 + 3 + 3  # of weights and of gradients


def test_layers_with_different_histories_of_one_input():
    """All read the history of the first in a step, and each records in its own."""
    model = jfp8.convert(Attention(nnx.Rngs(0)), exempt=())
    eye = jnp.eye(WIDTH, 8)
    histories = {"q": 448.0, "k": 1.0, "v": 0.5}
    for name, amax in histories.items():
        layer = getattr(model, name)
        layer.kernel[...] = eye
        product = layer.dot_general
        product.set_histories({"lhs": product.histories()["lhs"].at[0].set(amax)})
    x = jnp.full((ROWS, WIDTH), 2.0, jnp.float32).at[0, 0].set(-4.0)

    def loss(model, x):
        results = model.q(x), model.k(x), model.v(x)
        return sum(map(jnp.sum, results)), results

    (_, trained), _ = jfp8.nnx.value_and_grad(loss, has_aux=True)(model, x)
    for y in trained:  # no value is cut: scales are those of q
        np.testing.assert_allclose(y, x[:, :8], rtol=1e-6)
    for name, amax in histories.items():
        recorded = getattr(model, name).dot_general.histories()["lhs"]
        np.testing.assert_array_equal(recorded[:3], [4.0, amax, 0.0])


@pytest.mark.parametrize("name", ["nnx", "linen", "linen in a body"])
def test_a_frozen_teacher_keeps_its_history_for_itself(name):
    """Nothing updates that history, so a student that read it would cut its own inputs forever."""
    x = jnp.full((ROWS, WIDTH), 2.0, jnp.float32).at[0, 0].set(-4.0)
    if name == "nnx":
        teacher, student = (
            jfp8.nnx.Linear(WIDTH, 8, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2)
        )
        for layer, amax in ((teacher, 0.5), (student, 448.0)):
            layer.kernel[...] = jnp.eye(WIDTH, 8)
            past = layer.dot_general.histories()["lhs"].at[0].set(amax)
            layer.dot_general.set_histories({"lhs": past})
        teacher.eval()

        def loss(student, x):
            results = teacher(x), student(x)
            return sum(map(jnp.sum, results)), results

        (_, (cut, y)), _ = jfp8.nnx.value_and_grad(loss, has_aux=True)(student, x)
    else:
        layer = jfp8.Dense(8, use_bias=False, kernel_init=lambda *_: jnp.eye(WIDTH, 8))

        def trained(x):
            variables = layer.init(jax.random.key(0), x)
            state = jfp8.TrainState.create(
                apply_fn=layer.apply, variables=variables, tx=optax.sgd(0.0)
            )
            _, grads = jfp8.value_and_grad(lambda v, x: jnp.sum(layer.apply(v, x)))(state, x)
            return state.apply_gradients(grads)

        teacher, student = trained(x / 8).variables, trained(x)

        both = lambda variables, x: (layer.apply(teacher, x), layer.apply(variables, x))
        if name == "linen in a body":  # where a sink is a value like any other
            teacher = {**teacher, "fp8_sink": layer.init(jax.random.key(0), x)["fp8_sink"]}
            both = jax.checkpoint(both)

        def loss(variables, x):
            results = both(variables, x)
            return sum(map(jnp.sum, results)), {}, results

        (_, (cut, y)), _ = jfp8.value_and_grad(loss, has_aux=True)(student, x)
    assert jnp.max(jnp.abs(cut)) < 4
    np.testing.assert_allclose(y, x[:, :8], rtol=1e-6)
