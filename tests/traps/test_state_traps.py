"""Rows a to m: measured failures of other libraries, with the loss ``sum(y * dy)``."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jfp8
from support.amaxes import amax, only_product

KEY = jax.random.key(1)
DENSE = jfp8.Dense(4)


def filled(peak, shape=(8, 16), seed=0) -> jax.Array:
    """Numbers of which the largest is `peak`."""
    draw = np.random.default_rng(seed).uniform(-1, 1, size=shape)
    return jnp.asarray(draw / np.max(np.abs(draw)) * peak, jnp.float32)


def assert_one_entry(fp8, role, expected):
    entries = np.asarray(only_product(fp8)[role]["amax_history"])
    assert np.count_nonzero(entries) == 1
    assert np.float32(expected) <= entries[0] <= np.float32(expected) * np.float32(1.125)


def assert_close_to_stock(y, expected):
    """No saturated and no flushed operand: the error is that of two roundings to e4m3."""
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.06


def test_trap_h_step_zero():
    """Gradients of 2e-6 do not flush and activations of 1000 do not saturate."""
    x, dy = filled(1000.0), jnp.full((8, 4), 2e-6)
    variables = DENSE.init(KEY, x)
    state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.0))
    _, grads = jfp8.value_and_grad(lambda v, x: jnp.sum(DENSE.apply(v, x) * dy))(state, x)
    expected = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    assert_close_to_stock(grads.params["kernel"], expected)
    assert_close_to_stock(DENSE.apply(state.variables, x), x @ state.params["kernel"])


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
