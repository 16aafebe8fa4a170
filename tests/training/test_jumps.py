"""Delayed scaling does not cut weights that jump between two steps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8

X = jax.random.normal(jax.random.key(0), (256, 16))
Y = jax.random.normal(jax.random.key(1), (256, 8))
ZEROS = nn.initializers.zeros
TX = optax.adam(1e-2)


class Adapter(nn.Module):
    """A product whose kernel begins with zeros, as that of LoRA's B."""

    @nn.compact
    def __call__(self, x):
        return jfp8.Dense(8, use_bias=False, kernel_init=ZEROS, recipe="delayed")(x)


def linen_outputs(steps):
    """The output of each step of a scan, next to x W in f32."""
    model = Adapter()
    variables = model.init(jax.random.key(2), X)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=TX)

    def loss_fn(variables, x):
        y = model.apply(variables, x)
        return jnp.mean((y - Y) ** 2), {}, y

    def step(state, _):
        (_, y), grads = jfp8.value_and_grad(loss_fn, has_aux=True)(state, X)
        return state.apply_gradients(grads), (y, X @ state.params["Dense_0"]["kernel"])

    return jax.lax.scan(step, state, length=steps)[1]


def nnx_outputs(steps):
    model = jfp8.nnx.Linear(
        16, 8, use_bias=False, kernel_init=ZEROS, recipe="delayed", rngs=nnx.Rngs(2)
    )
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model):
        y = model(X)
        return jnp.mean((y - Y) ** 2), y

    @nnx.jit
    def step(model, optimizer):
        exact = X @ model.kernel[...]
        (_, y), grads = jfp8.nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return y, exact

    outputs = [step(model, optimizer) for _ in range(steps)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


@pytest.mark.parametrize("outputs_of", [linen_outputs, nnx_outputs])
def test_a_kernel_that_begins_with_zeros(outputs_of):
    """Each step within the rounding of E4M3, 2^-4, of the largest element."""
    outputs, exact = outputs_of(7)
    shares = np.sum(outputs * exact, (1, 2))[1:] / np.sum(exact * exact, (1, 2))[1:]
    np.testing.assert_allclose(shares, 1.0, atol=0.03)
    assert np.all(np.isfinite(outputs))
