"""A gradient records under every transformation: the oracle is NumPy's maximum."""

import contextlib
import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.nnx import Fp8Sink, Fp8State
from support.arrays import assert_same
from support.arrays import keyed_normal as normal
from support.later_jax import later_primitives

D = 16
X = normal(1, (8, D))
HOWS = ["jit", "remat", "remat3", "scan", "vmap"]


def mean_square(y):
    return jnp.mean(y**2)


class LinenModel(nn.Module):
    """One layer, called as `how` says; a ``scan`` is over a stack of one."""

    how: str

    @nn.compact
    def __call__(self, x):
        if self.how == "scan":
            body = lambda layer, x, _: (layer(x), None)
            axes = {"params": 0, "fp8": 0, "fp8_sink": 0}
            how = {"variable_axes": axes, "split_rngs": {"params": True}, "length": 1}
            return nn.scan(body, **how)(self.layer(jfp8.Dense), x, None)[0]
        return self.layer(nn.remat(jfp8.Dense) if self.how == "remat" else jfp8.Dense)(x)

    def layer(self, kind):
        return kind(D, use_bias=False, name="layer")


def of_linen(how):
    """Return the state, ``run(state, x)`` and ``gradient(state, x)``, which return new states."""
    model = LinenModel(how)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    params, fp8 = variables["params"], variables["fp8"]

    def loss(params, fp8, x):
        y, mutated = model.apply({"params": params, "fp8": fp8}, x, mutable=["fp8"])
        return mean_square(y), mutated["fp8"]

    def run(fp8, x):
        return loss(params, fp8, x)[1]

    def gradient(fp8, x):
        inner = jax.jit(loss) if how == "jit" else loss
        return jax.grad(inner, has_aux=True)(params, fp8, x)[1]

    if how == "vmap":
        each = lambda f: lambda fp8, x: jax.vmap(f, (None, 0))(fp8, x[:, None])
        largest = lambda f: lambda *args: jax.tree.map(lambda a: a.max(0), each(f)(*args))
        run, gradient = largest(run), largest(gradient)
    found = lambda fp8: [fp8["layer"]["DotGeneral_0"][r]["amax_history"] for r in ("lhs", "rhs")]
    newest = lambda fp8: [history.ravel()[0] for history in found(fp8)]
    return fp8, run, gradient, newest, params


class NnxModel(nnx.Module):
    def __init__(self, how):
        self.how = how
        make = lambda rngs: jfp8.nnx.Linear(D, D, use_bias=False, rngs=rngs)
        rngs = nnx.Rngs(0)
        self.layer = nnx.vmap(make)(rngs.split(1)) if how == "scan" else make(rngs)

    def __call__(self, x):
        call = lambda layer, x: layer(x)
        if self.how == "remat":
            call = nnx.remat(call)
        elif self.how == "vmap":
            call = nnx.vmap(call, in_axes=(None, 0))
        elif self.how == "scan":
            axes = nnx.StateAxes({(nnx.Param, Fp8State, Fp8Sink): 0, ...: None})
            call = nnx.scan(call, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        return call(self.layer, x)


def of_nnx(how):
    model = NnxModel(how)
    loss = lambda model, x: mean_square(model(x))

    def on_a_copy(f):
        def changed(state, x):
            copy = nnx.clone(model)
            nnx.update(copy, state)
            f(copy, x)
            return nnx.state(copy, Fp8State)

        return changed

    inner = nnx.jit(loss) if how == "jit" else loss
    gradient = on_a_copy(lambda model, x: nnx.grad(inner)(model, x))
    run = on_a_copy(lambda model, x: model(x))
    found = lambda state: [state["layer"]["dot_general"]["fp8"][r] for r in ("lhs", "rhs")]
    newest = lambda state: [v.get_value().ravel()[0] for v in found(state)]
    state = nnx.state(model, Fp8State)
    return state, run, gradient, newest, model.layer


@pytest.fixture(params=HOWS)
def how(request):
    is_later = request.param == "remat3"
    with later_primitives("jax_remat3") if is_later else contextlib.nullcontext():
        yield "remat" if is_later else request.param


@pytest.mark.parametrize("api", [of_linen, of_nnx])
def test_a_gradient_records_and_nothing_else_does(api, how):
    state, run, gradient, newest, weights = api(how)
    (kernel,) = jax.tree.leaves(nnx.state(weights, nnx.Param) if api is of_nnx else weights)
    expected = [np.max(np.abs(X)), np.max(np.abs(kernel))]

    assert not any(map(np.any, jax.tree.leaves(run(state, X))))
    recorded = gradient(state, X)
    np.testing.assert_array_equal(newest(recorded), expected)
    assert_same(run(recorded, 100 * X), recorded)


@pytest.mark.parametrize("amax", [0.0, 3.0, -3.0], ids=["ended", "under way", "recorded"])
def test_an_evaluation_returns_the_collection_bit_for_bit(amax):
    model = jfp8.Dense(D)
    variables = model.init(jax.random.key(0), X)
    product = dict(variables["fp8"]["DotGeneral_0"])
    history = jnp.zeros(16).at[0].set(3.0)
    product["lhs"] = {"amax_history": history, "amax": jnp.float32(amax)}
    given = {"DotGeneral_0": {**product, "check": jnp.float32(0)}}
    for fp8 in (given, {"DotGeneral_0": {**product, "check": jnp.float32(1)}}):  # was averaged
        for sink in ({}, {"fp8_sink": variables["fp8_sink"]}):
            both = {"params": variables["params"], "fp8": fp8, **sink}
            _, mutated = model.apply(both, X, mutable=["fp8"])
            assert_same(mutated["fp8"], fp8)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_an_evaluation_reduces_no_activation_to_a_maximum(api, compiled_here):
    """The program knows histories and weights: XLA computes all scales ahead."""
    if api == "nnx":
        model = jfp8.nnx.Linear(D, D, rngs=nnx.Rngs(0))
        nnx.jit(nnx.grad(lambda model: mean_square(model(X))))(model)
        evaluate = lambda x: (model(x), ())
    else:
        layer = jfp8.Dense(D)
        variables = jax.jit(layer.init)(jax.random.key(0), X)
        loss = lambda v, x: mean_square(layer.apply(v, x))
        state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.1))
        step = lambda state: state.apply_gradients(jfp8.value_and_grad(loss)(state, X)[1])
        state = jax.jit(step)(state)
        variables = {"params": state.params, "fp8": state.fp8}
        evaluate = lambda x: layer.apply(variables, x, mutable=["fp8"])
    text = jax.jit(evaluate).lower(X).compile().as_text()
    assert "maximum(" not in text
    gradient = jax.jit(lambda x: jax.vjp(evaluate, x, has_aux=True)[1](x))
    assert "maximum(" in gradient.lower(X).compile().as_text()  # in the backward pass


@pytest.fixture
def few_objects():
    """Keep the collector from searching what other tests left, which takes half a minute."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_a_step_leaks_no_tracer():
    model = jfp8.linen.MultiHeadDotProductAttention(num_heads=2)
    x = X[None]
    loss = lambda v, x: mean_square(model.apply(v, x))
    state_of = lambda model, x: jax.eval_shape(
        lambda: jfp8.TrainState.create(
            apply_fn=None, variables=model.init(jax.random.key(0), x), tx=optax.sgd(0.1)
        )
    )
    with jax.checking_leaks():
        jax.eval_shape(jfp8.value_and_grad(loss), state_of(model, x), x)
        attention = jfp8.nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))
        nnx.eval_shape(jfp8.nnx.value_and_grad(lambda m, x: mean_square(m(x))), attention, x)
        converted = jfp8.convert(nn.Sequential([nn.Dense(D), nn.relu, nn.Dense(D)]), exempt=())
        loss = lambda v, x: mean_square(converted.apply(v, x))
        jax.eval_shape(jfp8.value_and_grad(loss), state_of(converted, x), x)
        block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)
        function = jfp8.convert(lambda w, x: mean_square(block(w, x)), exempt=())
        w = jnp.ones((D, D))
        states = jax.eval_shape(function.init, w, x)
        jax.eval_shape(jax.grad(function, argnums=(0, 1)), w, states, x)
