"""Calls that people write, and that ended in an error of another library or were silently wrong."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same, normal

X, Y = normal((8, 16), 1), normal((8, 4), 2)


def state_of(model, tx) -> jfp8.TrainState:
    variables = model.init(jax.random.key(0), X)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def loss_of(model):
    return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


OPTIMIZERS = {
    "adamw": jfp8.optim.adamw(1e-2),
    "msamp_o2": jfp8.optim.adam(1e-2, preset="msamp_o2"),
    "multi_steps": optax.MultiSteps(jfp8.optim.adamw(1e-2), 2),
    "skip_on_overflow": jfp8.skip_on_overflow(jfp8.optim.adamw(1e-2)),
    "masters": jfp8.optim.master_weights(jfp8.optim.adamw(1e-2), "float16_scaled"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stored_states_in_nnx_optimizer(name):
    """The second update of a kernel above `min_size` failed. The oracle is a loop over arrays."""
    tx = OPTIMIZERS[name]
    dtype = jnp.bfloat16 if "masters" in name else jnp.float32
    model = nnx.Linear(64, 64, param_dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    opt_state = tx.init(params)

    @jax.jit
    def wanted_step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    shapes = {name: param.shape for name, param in params.items()}
    for seed in range(4):
        grads = {name: jnp.asarray(normal(shape, seed), dtype) for name, shape in shapes.items()}
        params, opt_state = wanted_step(params, opt_state, nnx.State(grads))
        step(model, optimizer, nnx.State(jax.tree.map(nnx.Param, grads)))
    assert_same(nnx.as_pure(nnx.state(model, nnx.Param)), params)
    assert_same(jax.tree.leaves(nnx.as_pure(optimizer.opt_state)), jax.tree.leaves(opt_state))


@pytest.mark.parametrize(
    "tx",
    [
        optax.polyak_sgd(),
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=1)),
        jfp8.skip_on_overflow(optax.polyak_sgd()),
    ],
    ids=["polyak", "plateau", "inside skip_on_overflow"],
)
def test_optimizers_that_want_the_loss(tx):
    """The oracle is JAX's and Optax's own loop of the same model in f32."""
    model = nn.Dense(4)
    state, loss_fn = state_of(model, tx), loss_of(model)

    def step(state, _):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, X, Y)
        return state.apply_gradients(grads, value=loss), loss

    def plain_step(carry, _):
        params, opt_state = carry
        differentiate = jax.value_and_grad(lambda params: loss_fn({"params": params}, X, Y))
        loss, grads = differentiate(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), loss

    after, losses = jax.lax.scan(step, state, length=6)
    wanted, wanted_losses = jax.lax.scan(plain_step, (state.params, state.opt_state), length=6)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(after.params), jax.tree.leaves(wanted[0])):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_extra_arguments_with_a_loss_scale_and_histories():
    """The loss is passed on as it is, unscaled, and a step that is skipped stays skipped."""
    model = jfp8.Dense(4, recipe="delayed")
    taken = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros(()), lambda updates, state, params, *, value: (updates, value)
    )
    state = state_of(model, optax.chain(jfp8.loss_scale(init_scale=8.0), taken, optax.sgd(0.1)))
    loss_fn = loss_of(model)

    @jax.jit
    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x, Y)
        return state.apply_gradients(grads, value=loss), loss

    state, loss = step(state, X)
    assert state.opt_state[1] == loss > 0
    assert step(state, X * np.inf)[0].opt_state[1] == loss


def test_a_functional_loop_of_one_product():
    """The loop that docstrings suggest has the histories of `TrainState`, bit for bit."""
    model = jfp8.Dense(4, use_bias=False, recipe="delayed")
    state, loss_fn = state_of(model, optax.sgd(0.1)), loss_of(model)

    def step(state, _):
        _, grads = jfp8.value_and_grad(loss_fn)(state, X, Y)
        return state.apply_gradients(grads), None

    recipe, contracting = jfp8.recipes.get("delayed"), (((1,), (0,)), ((), ()))

    def loss_of_product(kernel, sink, history):
        y = jfp8.scaled_dot_general(X, kernel, contracting, recipe=recipe, state=history, sink=sink)
        return jnp.mean((y - Y) ** 2)

    def functional_step(carry, _):
        kernel, history = carry
        differentiate = jax.grad(loss_of_product, argnums=(0, 1))
        gradient, cotangent = differentiate(kernel, jfp8.scaling.init_sink(), history)
        return (kernel - 0.1 * gradient, jfp8.advance(history, cotangent)), None

    start = (state.params["kernel"], recipe.init_state())
    (kernel, history), _ = jax.lax.scan(functional_step, start, length=6)
    after, _ = jax.lax.scan(step, state, length=6)
    assert_same(history, after.fp8["DotGeneral_0"])
    assert np.count_nonzero(history["grad"]["amax_history"]) == 6
    np.testing.assert_allclose(kernel, after.params["kernel"], rtol=1e-5, atol=1e-7)


def test_one_sink_for_a_whole_collection_is_refused():
    state = state_of(jfp8.Dense(4, recipe="delayed"), optax.sgd(0.1))
    with pytest.raises(ValueError, match="'amax'] at the top, which the fp8 collection lacks"):
        jfp8.advance(state.fp8, jfp8.scaling.init_sink())


def test_metrics_without_has_aux_are_told():
    """They were taken for collections, and dropped."""
    model = jfp8.Dense(4, recipe="delayed")
    state, loss_fn = state_of(model, optax.sgd(0.1)), loss_of(model)
    with_metrics = lambda *args: (loss_fn(*args), {"accuracy": jnp.ones(())})
    with pytest.raises(ValueError, match=r"\['accuracy'\] in mutated.*has_aux=True"):
        jax.jit(jfp8.value_and_grad(with_metrics))(state, X, Y)

    corrected = lambda *args: (loss_fn(*args), {}, {"accuracy": jnp.ones(())})
    (_, aux), _ = jfp8.value_and_grad(corrected, has_aux=True)(state, X, Y)
    assert aux["accuracy"] == 1


def test_collections_that_models_sow_are_no_metrics():
    model = jfp8.Dense(4, recipe="delayed")
    state = state_of(model, optax.sgd(0.1))

    def loss_fn(variables, x):
        y, mutated = model.apply(
            variables, x, mutable=["fp8", "intermediates"], capture_intermediates=True
        )
        return jnp.mean(y**2), mutated

    _, grads = jfp8.value_and_grad(loss_fn)(state, X)
    assert grads.collections == {}
