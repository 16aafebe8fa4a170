"""Projections of one array quantize it once, and read one history."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import jfp8
import jfp8.nnx
from gpu_programs import device_of
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Options, State
from jfp8.products.shared_input import SharedInput, shared_inputs
from jfp8.recipes import DelayedScaling
from support.arrays import assert_same

ROWS, WIDTH = 24, 16
X = jax.random.normal(jax.random.key(0), (1, ROWS, WIDTH))
NUMBERS = (((1,), (0,)), ((), ()))


def nnx_step(width=WIDTH, recipe="delayed", dtype=None):
    layer = jfp8.nnx.MultiHeadAttention(
        2, width, decode=False, use_bias=False, recipe=recipe, dtype=dtype, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)

    def step(state, x):
        model = nnx.merge(graph, state)
        return jfp8.nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x)

    return step, state


def linen_step(width=WIDTH, recipe="delayed", dtype=None):
    model = jfp8.linen.MultiHeadDotProductAttention(2, recipe=recipe, use_bias=False, dtype=dtype)
    x = jnp.ones((1, 1, width))
    state = jfp8.TrainState.create(
        apply_fn=model.apply, variables=model.init(jax.random.key(0), x), tx=optax.sgd(0.1)
    )
    return jfp8.value_and_grad(lambda v, x: jnp.sum(model.apply(v, x) ** 2)), state


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels")
@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("make", "recipe", "dtype"),
    [
        (nnx_step, "delayed", None),
        (linen_step, "delayed", jnp.bfloat16),
        (nnx_step, "current", jnp.bfloat16),
        (linen_step, "current", None),
    ],
)
def test_kernels_quantize_the_input_of_three_projections_once(make, recipe, dtype):
    """Devices receive the FP8 results of one kernel, not of three equal ones."""
    gpu = AbstractMesh((), (), abstract_device=device_of("h200"))
    width = 2048
    x = jax.ShapeDtypeStruct((4, 2048, width), jnp.float32)
    steps = []

    def init():
        step, state = make(width, recipe, dtype)
        steps.append(step)
        return state

    with jax.sharding.use_abstract_mesh(gpu):
        state = jax.eval_shape(init)
        text = str(jax.make_jaxpr(steps[0])(state, x))
    # Inputs of the projections and of the output, four weights, and four gradients.
    assert text.count("name=quantize_both_ways") == 2 + 4 + 4


def layers_of(layer):
    return {name: getattr(layer, name).dot_general for name in ("query", "key", "value")}


@pytest.mark.parametrize("inputs", ["one", "two", "three"])
def test_projections_with_different_histories(inputs):
    """Those of one array read the history of the first; each records in its own."""
    layer = jfp8.nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=nnx.Rngs(0))
    histories = {"query": 448.0, "key": 1.0, "value": 0.5}
    for name, product in layers_of(layer).items():
        product.set_histories({"lhs": product.histories()["lhs"].at[0].set(histories[name])})
    x = X.at[0, 0, 0].set(-4.0)
    arrays = {"one": (x, None, None), "two": (x, 1 * x, None), "three": (x, 1 * x, 1 * x)}[inputs]
    read = {
        "one": {"query": 448.0, "key": 448.0, "value": 448.0},
        "two": {"query": 448.0, "key": 1.0, "value": 1.0},
        "three": histories,
    }[inputs]
    results = {}

    def attend(query, key, value, **_):
        results.update(query=query, key=key, value=value)
        return query + key + value

    layer.attention_fn = attend
    kernels = {name: getattr(layer, name).kernel[...] for name in read}
    layer(*arrays)
    for name, amax in read.items():
        state = DelayedScaling().init_state()
        state["lhs"]["amax_history"] = state["lhs"]["amax_history"].at[0].set(amax)
        kernel = kernels[name].reshape(WIDTH, -1)
        alone = jfp8.scaled_dot_general(x[0], kernel, NUMBERS, state=state)
        np.testing.assert_allclose(results[name].reshape(ROWS, -1), alone, rtol=1e-5, atol=1e-6)

    nnx.grad(lambda layer: jnp.sum(layer(*arrays)))(layer)
    for name, product in layers_of(layer).items():
        newest = product.histories()["lhs"][:2]
        np.testing.assert_array_equal(newest, [4.0, histories[name]])


def test_a_caller_shares_an_input():
    """As a program that knows two matmuls of one variable; inside of another trace it is apart."""
    shared, other = shared_inputs(X, 1 * X)
    assert shared_inputs(X, X)[0] is not shared
    assert len({id(s) for s in shared_inputs(X, X, 1 * X)}) == 2
    histories = [DelayedScaling().init_state() for _ in range(3)]
    for state, amax in zip(histories, (8.0, 2.0, 2.0), strict=True):
        state["lhs"]["amax_history"] = state["lhs"]["amax_history"].at[0].set(amax)
    kernel, x = jnp.eye(WIDTH), jnp.full((2, WIDTH), 4.0)

    def product(state, shared):
        options = Options(DelayedScaling())
        return observed_dot_general(x, kernel, NUMBERS, options, State(state, shared=shared))[0]

    first, second, third = map(product, histories, (shared, shared, other))
    np.testing.assert_allclose([first[0, 0], second[0, 0], third[0, 0]], [4.0, 4.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(product)(histories[1], shared), third)
    assert_same(jax.tree.leaves(shared), [])
    assert isinstance(jax.tree.map(lambda x: x, shared), SharedInput)
