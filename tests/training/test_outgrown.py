"""A history that is older than what it scales: the oracle is current scaling, next to f32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import keyed_normal as normal
from support.arrays import relative_error

D = 48
NUMBERS = (((1,), (0,)), ((), ()))
TARGET = normal(9, (64, D))
W = normal(3, (D, D)) / 7
TX = optax.adam(1e-2)


def batch(seed):
    return normal(seed, (64, D))


def loss_of(y):
    return jnp.mean((y - TARGET) ** 2)


class Linen:
    """A layer in training: `step` returns the gradient of its kernel, and `put` replaces it."""

    model = jfp8.Dense(D, use_bias=False)

    def __init__(self, kernel):
        variables = {**self.model.init(jax.random.key(0), batch(0)), "params": {"kernel": kernel}}
        self.state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=TX)
        loss = lambda variables, x: loss_of(self.model.apply(variables, x))
        self.gradient = jax.jit(jfp8.value_and_grad(loss))

    def step(self, x):
        self.loss, grads = self.gradient(self.state, x)
        self.state = self.state.apply_gradients(grads)
        return grads.params["kernel"]

    def put(self, kernel):
        self.state = self.state.replace(params={"kernel": kernel})

    def __call__(self, x):
        return self.model.apply(self.state.variables, x)

    kernel = property(lambda self: self.state.params["kernel"])


class Converted(Linen):
    model = jfp8.convert(nn.Dense(D, use_bias=False), exempt=())


class Nnx:
    def __init__(self, kernel):
        self.model = jfp8.nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
        self.put(kernel)
        self.optimizer = jfp8.nnx.Optimizer(self.model, TX)
        self.gradient = nnx.jit(jfp8.nnx.value_and_grad(lambda model, x: loss_of(model(x))))

    def step(self, x):
        self.loss, grads = self.gradient(self.model, x)
        self.optimizer.update(self.model, grads)
        return grads["kernel"].get_value()

    def put(self, kernel):
        nnx.update(self.model, nnx.State({"kernel": nnx.Param(kernel)}))

    def __call__(self, x):
        return self.model(x)

    kernel = property(lambda self: self.model.kernel.get_value())


class Function:
    def __init__(self, kernel):
        self.multiply = jfp8.convert(lambda w, x: x @ w, exempt=())
        self.kernel, self.state = kernel, self.multiply.init(kernel, batch(0))
        self.optimizer = TX.init(kernel)
        loss = lambda w, state, x: loss_of(self.multiply(w, state, x))
        self.gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def step(self, x):
        grad, self.state = self.gradient(self.kernel, self.state, x)
        update, self.optimizer = TX.update(grad, self.optimizer)
        self.put(self.kernel + update)
        return grad

    def put(self, kernel):
        self.kernel = kernel

    def __call__(self, x):
        return self.multiply(self.kernel, self.state, x)


def current(x, w):
    return jfp8.scaled_dot_general(x, w, NUMBERS, recipe="current")


def times_current(found, of_product, x, w):
    """The error of what was `found`, divided by the error of current scaling."""
    exact = of_product(jnp.matmul, x, w)
    least = relative_error(of_product(current, x, w), exact)
    assert 0.01 < least < 0.1
    return relative_error(found, exact) / least


def result(product, x, w):
    return product(x, w)


def gradient(product, x, w):
    return jax.grad(lambda w: loss_of(product(x, w)))(w)


CHANGES = {
    "applied": lambda now, before: now,
    "restored": lambda now, before: before,
    "averaged": lambda now, before: (now + before) / 2,
    "50 times": lambda now, before: 50 * now,
    "a thousandth": lambda now, before: now / 1000,
    "swapped": lambda now, before: normal(8, (D, D)),
}


@pytest.mark.parametrize("kind", [Linen, Converted, Nnx, Function])
def test_an_evaluation_scales_the_weight_that_it_multiplies(kind):
    """An evaluation of 50 times the weights was 0.96 wrong, one after zeros' first steps 0.5."""
    trained, x = kind(W), batch(7)
    trained.step(batch(0))
    before = trained.kernel
    for i in range(3):
        trained.step(batch(i))
    now = trained.kernel
    for name, change in CHANGES.items():
        trained.put(change(now, before))
        assert times_current(trained(x), result, x, trained.kernel) < 1.2, name
    trained = kind(jnp.zeros((D, D)))
    for i in range(4):
        trained.step(batch(i))
        assert times_current(trained(x), result, x, trained.kernel) < 1.2, f"zeros, step {i}"


@pytest.mark.parametrize("kind", [Linen, Nnx])
def test_a_kernel_that_begins_with_zeros(kind):
    """LoRA's B does, and doubles in its second step. The loss is nearly linear in small results."""
    trained, x, loss_of_zeros = kind(jnp.zeros((D, D))), batch(0), loss_of(jnp.zeros((64, D)))
    for i in range(7):
        exact = loss_of(x @ trained.kernel)
        trained.step(x)
        found = trained.loss
        assert i == 0 or abs((found - loss_of_zeros) / (exact - loss_of_zeros) - 1) < 0.03


def test_a_generated_token_changes_no_scale_of_another():
    """Activations are still scaled by their history, which is known before the sequence is."""
    trained = Linen(W)
    trained.step(batch(0))
    trained.step(100 * batch(0))  # a jump, which the next training step does not believe
    x = batch(1)
    np.testing.assert_array_equal(trained(x)[:-1], trained(x.at[-1].multiply(1e4))[:-1])


@pytest.mark.parametrize("kind", [Linen, Converted, Nnx])
@pytest.mark.parametrize("factor", [10, 1e6])
def test_a_spike_costs_the_step_that_has_it(kind, factor):
    """A spike of a million made 16 steps multiply zeros."""
    trained, errors = kind(W), []
    for factor_now in (1, 1, 1, factor, 1, 1, 1):
        x, w = factor_now * batch(4), trained.kernel
        errors.append(times_current(trained.step(x), gradient, x, w))
        trained.put(w)
    assert errors[3] > 5
    assert max(errors[:3] + errors[4:]) < 1.2
