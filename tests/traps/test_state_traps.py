"""The ways in which FP8 state goes wrong when the cotangent of a history carries the new history.

Rows a to m are measured failures of other libraries, and jfp8 has to be right in each situation.
The loss is always ``sum(y * dy)``, whose gradient by the output is ``dy`` itself.
"""

from __future__ import annotations

import functools

import flax.core
import flax.errors
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import PartitionSpec

import jfp8
from support.amaxes import amax, only_product

KEY = jax.random.key(1)
DENSE = jfp8.Dense(4)


def filled(peak, shape=(8, 16), seed=0) -> jax.Array:
    """Numbers of which the largest is `peak`."""
    draw = np.random.default_rng(seed).uniform(-1, 1, size=shape)
    return jnp.asarray(draw / np.max(np.abs(draw)) * peak, jnp.float32)


def history(fp8, role) -> np.ndarray:
    return np.asarray(only_product(fp8)[role]["amax_history"])


def assert_one_entry(fp8, role, expected, exact=False):
    entries = history(fp8, role)
    assert np.count_nonzero(entries) == 1
    if exact:
        np.testing.assert_allclose(entries[0], np.float32(expected), rtol=2.0**-22)
    else:
        assert np.float32(expected) <= entries[0] <= np.float32(expected) * np.float32(1.125)


def sink_cotangent(loss, variables):
    return jax.grad(lambda sink: loss({**variables, "fp8_sink": sink}))(variables["fp8_sink"])


def step_of(loss, variables):
    """The ``fp8`` collection after one hand-written step."""
    return jfp8.advance(variables["fp8"], sink_cotangent(loss, variables))


def assert_close_to_stock(y, expected):
    """No saturated and no flushed operand: the error is that of two roundings to e4m3."""
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.06


def train_state(model=DENSE, tx=None, x=None):
    variables = model.init(KEY, filled(1.0) if x is None else x)
    tx = optax.sgd(0.0) if tx is None else tx
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def linear_loss(variables, batch):
    return jnp.sum(DENSE.apply(variables, batch["x"]) * batch["dy"]), {}


def train_step(state, batch, loss_fn=linear_loss):
    return state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, batch)[1])


class Twice(nn.Module):
    @nn.compact
    def __call__(self, first, second):
        dense = jfp8.Dense(4)
        return dense(first), dense(second)


@pytest.mark.slow
def test_trap_a_layer_called_twice():
    """Inputs of 2 and 3: the amax is 3, not 5, and so is the scale's."""
    xs = filled(2.0), filled(3.0, seed=1)
    dys = filled(0.2, (8, 4)), filled(0.3, (8, 4), 1)
    variables = Twice().init(KEY, *xs)

    def loss(variables):
        return sum(jnp.sum(y * dy) for y, dy in zip(Twice().apply(variables, *xs), dys))

    variables["fp8"] = step_of(loss, variables)
    assert_one_entry(variables["fp8"], "lhs", 3.0)
    assert_one_entry(variables["fp8"], "grad", 0.3)
    assert_one_entry(
        variables["fp8"], "rhs", amax(variables["params"]["Dense_0"]["kernel"]), exact=True
    )
    for y, x in zip(Twice().apply(variables, *xs), xs):
        assert_close_to_stock(y, x @ variables["params"]["Dense_0"]["kernel"])


@pytest.mark.slow
def test_trap_one_outlier_among_ten_thousand_uses():
    """The 18th of the inputs, and the last of the gradients, of which all are 1e-25."""
    n, dy = 10_000, np.float32(1.03e-25)
    x = np.tile(np.asarray(filled(1.03, (1, 8))), (n, 1, 1))
    x[17] *= np.float32(1.12 / 1.03)
    dys = np.full((n, 1, 4), dy)
    dys[n - 1] *= np.float32(1.12 / 1.03)
    variables = DENSE.init(KEY, x[0])

    def loss(variables):
        use = lambda total, x_dy: (total + jnp.sum(DENSE.apply(variables, x_dy[0]) * x_dy[1]), None)
        return lax.scan(use, jnp.float32(0), (x, dys))[0]

    fp8 = jax.jit(functools.partial(step_of, loss))(variables)
    assert_one_entry(fp8, "lhs", amax(x))
    assert_one_entry(fp8, "grad", amax(dys))
    assert_one_entry(fp8, "rhs", amax(variables["params"]["kernel"]), exact=True)


@pytest.mark.slow
def test_trap_e_dynamic_scale_divides_the_cotangent():
    """Flax's DynamicScale divides all gradients by 2^16: amaxes do not notice."""
    variables, x, dy = DENSE.init(KEY, filled(1.0)), filled(5.3), filled(0.7, (8, 4))

    def loss(params, sink):
        return jnp.sum(DENSE.apply({**variables, "params": params, "fp8_sink": sink}, x) * dy)

    gradient = DynamicScale(scale=jnp.float32(65536.0)).value_and_grad(loss, argnums=(0, 1))
    _, finite, _, (grads, cotangent) = gradient(variables["params"], variables["fp8_sink"])
    fp8 = jfp8.advance(variables["fp8"], cotangent)
    assert finite
    assert_one_entry(fp8, "lhs", 5.3, exact=True)
    assert_one_entry(fp8, "grad", 0.7 * 65536, exact=True)  # what the products really saw
    expected = jax.grad(loss)(variables["params"], variables["fp8_sink"])
    np.testing.assert_array_equal(grads["kernel"], expected["kernel"])


def test_trap_h_step_zero():
    """Gradients of 2e-6 do not flush and activations of 1000 do not saturate."""
    x, dy = filled(1000.0), jnp.full((8, 4), 2e-6)
    state = train_state(x=x)
    grads = jfp8.value_and_grad(linear_loss)(state, {"x": x, "dy": dy})[1]
    expected = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    assert_close_to_stock(grads.params["kernel"], expected)
    assert_close_to_stock(DENSE.apply(state.variables, x), x @ state.params["kernel"])


@pytest.mark.slow
def test_trap_i_float16_does_not_overflow_before_the_scales():
    """256 products of 448 times 448 are 5e7, where float16 ends at 65504."""
    model, x = jfp8.Dense(4, dtype=jnp.float16), jnp.ones((8, 256), jnp.float16)
    dy = jnp.full((8, 4), 0.5, jnp.float16)

    @jax.jit
    def step(variables):
        def loss(params, sink):
            y = model.apply({**variables, "params": params, "fp8_sink": sink}, x)
            return jnp.vdot(y, dy), y

        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, cotangent), y = gradient(variables["params"], variables["fp8_sink"])
        return y, grads["kernel"], jfp8.advance(variables["fp8"], cotangent)

    variables = jax.jit(model.init)(KEY, x)
    variables["params"]["kernel"] = jnp.full((256, 4), 2.0**-4)
    for _ in range(3):
        y, dw, variables["fp8"] = step(variables)
        assert y.dtype == jnp.float16
        np.testing.assert_array_equal(y, np.full((8, 4), 16.0))
        # In f32, with the roundings of two scales and of their product.
        np.testing.assert_allclose(dw, np.full((256, 4), 4.0), rtol=2**-22)
    np.testing.assert_array_equal(history(variables["fp8"], "grad")[:4], [0.5, 0.5, 0.5, 0.0])


class TestTrapJ:
    def test_trap_j_apply_works_without_the_collection(self):
        params, x = DENSE.init(KEY, filled(1.0))["params"], filled(1000.0)
        assert_close_to_stock(DENSE.apply({"params": params}, x), x @ params["kernel"])

    @pytest.mark.slow
    def test_trap_j_a_checkpoint_of_the_stock_model_restores(self):
        """From bf16 training without FP8, by bytes, into a TrainState and into variables."""
        stock = nn.Dense(4, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        model = jfp8.Dense(4, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        saved = stock.init(jax.random.key(99), filled(1.0))["params"]
        state = train_state(model)
        params = flax.serialization.from_bytes(state.params, flax.serialization.to_bytes(saved))
        state = state.replace(params=params)
        x = filled(2.0)
        assert_close_to_stock(
            model.apply(state.variables, x).astype(np.float32),
            stock.apply({"params": saved}, x).astype(np.float32),
        )
        loss_fn = lambda v, batch: (jnp.sum(model.apply(v, batch["x"]) * batch["dy"]), {})
        dy = filled(0.5, (8, 4)).astype(jnp.bfloat16)
        state = train_step(state, {"x": x, "dy": dy}, loss_fn)
        assert_one_entry(state.fp8, "lhs", 2.0, exact=True)
        # And back: the parameters of the FP8 model are those of the stock model.
        flax.serialization.from_bytes(saved, flax.serialization.to_bytes(state.params))


class TestTrapL:
    def test_trap_l_forward_mode_is_refused(self):
        variables, x = DENSE.init(KEY, filled(1.0)), filled(1.0)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda x: DENSE.apply(variables, x), (x,), (x,))

    @pytest.mark.parametrize("mode", ["reverse over reverse", "forward over reverse"])
    def test_trap_l_second_derivatives_are_right_or_refused(self, mode):
        """The backward pass works on f8 bytes, whose derivative must not silently be zero."""
        params, x = DENSE.init(KEY, filled(1.0))["params"], filled(1.0)

        def curvature(model):
            gradient = jax.grad(lambda x: jnp.sum(model.apply({"params": params}, x) ** 2))
            if mode == "forward over reverse":
                return jax.jvp(gradient, (x,), (jnp.ones_like(x),))[1]
            return jax.grad(lambda x: jnp.sum(gradient(x)))(x)

        expected = np.asarray(curvature(nn.Dense(4)))
        try:
            ours = np.asarray(curvature(DENSE))
        except TypeError:
            return
        assert np.linalg.norm(ours - expected) < 0.3 * np.linalg.norm(expected)


class Backbone(nn.Module):
    """A frozen layer and a head."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(jfp8.Dense(16, name="frozen", implementation="emulate")(x))
        return jfp8.Dense(4, name="head", implementation="emulate")(x)


@pytest.mark.slow
def test_trap_m_frozen_layers_cost_no_backward_pass():
    """A sink forces the backward pass through its layer; without it, there is none."""
    variables, x = Backbone().init(KEY, filled(1.0)), filled(1.0)

    def gradient(sinks):
        def loss(head, sinks):
            params = {"frozen": variables["params"]["frozen"], "head": head}
            y = Backbone().apply({**variables, "params": params, "fp8_sink": sinks}, x)
            return jnp.sum(y)

        return lambda: jax.grad(loss, argnums=(0, 1))(variables["params"]["head"], sinks)

    def products(f):
        return str(jax.make_jaxpr(f)()).count("dot_general[")

    sinks = variables["fp8_sink"]
    with_all, with_head = gradient(sinks), gradient({"head": sinks["head"]})
    assert products(with_all) == 2 * 3
    assert products(with_head) == 1 + 3

    grads, cotangent = with_head()
    np.testing.assert_array_equal(grads["kernel"], with_all()[0]["kernel"])
    fp8 = jfp8.advance(variables["fp8"], cotangent)
    assert_one_entry(fp8["head"], "grad", 1.0, exact=True)
    for leaf in jax.tree.leaves(fp8["frozen"]):
        assert not np.any(leaf)


# What Flax and JAX cannot do, and the way around it.


@pytest.mark.slow
def test_trap_constraint_3_operands_that_vary_over_different_axes():
    """Under shard_map x varies along one mesh axis, the weights along another."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    variables, x = DENSE.init(KEY, filled(1.0)), filled(3.0)
    numbers = (((1,), (0,)), ((), ()))

    def local(x, kernel, sink):
        product = lambda x, kernel, sink: jnp.sum(
            jfp8.scaled_dot_general(x, kernel, numbers, sink=sink)
        )
        return jax.grad(product, argnums=(0, 1, 2))(x, kernel, sink)

    spec = PartitionSpec
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec("d"), spec(None, "m"), spec()),
        out_specs=(spec("d"), spec(None, "m"), spec()),
    )
    kernel = variables["params"]["kernel"]
    sink = only_product(variables["fp8_sink"])["amax"]
    dx, dw, cotangent = jax.device_get(jax.jit(sharded)(x, kernel, sink))
    ones = np.ones((8, 4))
    assert_close_to_stock(dx, ones @ np.asarray(kernel, np.float64).T)
    assert_close_to_stock(dw, np.asarray(x, np.float64).T @ ones)
    fp8 = jfp8.advance(variables["fp8"], {"DotGeneral_0": {"amax": cotangent}})
    assert_one_entry(fp8, "lhs", 3.0)
    assert_one_entry(fp8, "rhs", amax(kernel))
