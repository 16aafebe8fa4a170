"""The mixture of experts of NNX: that of Linen, bit by bit, whose formulas `test_moe` checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.recipes.per_tensor import DelayedScaling
from support.arrays import assert_same, normal

KEY = jax.random.key(4)
FEATURES, EXPERTS, HIDDEN = 16, 5, 24
OPTIONS = {
    "route": functools.partial(jfp8.nnx.route, scores="sigmoid"),
    "bias_update_rate": 0.125,
    "capacity_factor": 0.5,
    "return_load_balancing_loss": True,
    "dtype": jnp.bfloat16,
    "recipe": DelayedScaling(amax_history_len=3),
}


X, DY = normal((3, 6, FEATURES)), normal((3, 6, FEATURES), 1)


def both(**options):
    """A model of Linen with its variables, and one of NNX with the same parameters."""
    linen = jfp8.MoE(EXPERTS, HIDDEN, **options)
    variables = jax.jit(linen.init)(KEY, X)
    ours = jfp8.nnx.MoE(FEATURES, EXPERTS, HIDDEN, **options, rngs=nnx.Rngs(0))
    shapes = functools.partial(jax.tree.map, jnp.shape)
    assert shapes(params_of(ours)) == shapes(variables["params"])
    nnx.update(ours, nnx.State(variables["params"]))
    return linen, variables, ours


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_steps_are_those_of_linen():
    """Outputs, gradients, histories and biases of each step, to the bit."""
    linen, variables, ours = both(**OPTIONS)

    def value(result):
        y, balance = result
        return jnp.sum(y.astype(jnp.float32) * DY) + 0.01 * balance, y

    def linen_loss(variables, x):
        result, mutated = linen.apply(variables, x, mutable=["router_bias"])
        return (*(value(result)[:1]), mutated, value(result)[1])

    @jax.jit
    def linen_step(state, x):
        (_, y), grads = jfp8.value_and_grad(linen_loss, has_aux=True)(state, x)
        return state.apply_gradients(grads), y, grads.params

    @nnx.jit
    def our_step(model, x):
        loss = lambda model, x: value(model(x))
        (_, y), grads = jfp8.nnx.value_and_grad(loss, has_aux=True)(model, x)
        return y, nnx.to_pure_dict(grads)

    state = jfp8.TrainState.create(
        apply_fn=linen.apply, variables=variables, tx=optax.set_to_zero()
    )
    for step in range(2):
        x = (1 + step) * X
        state, y, grads = linen_step(state, x)
        assert_same(our_step(ours, x), (y, grads))
        for layer in ("wi", "wo"):
            theirs = state.fp8[layer]["RaggedDot_0"]
            for role, history in getattr(ours, layer).ragged_dot.histories().items():
                np.testing.assert_array_equal(history, theirs[role]["amax_history"])
                assert np.count_nonzero(history) == step + 1
        bias = state.collections["router_bias"]["router"]["bias"]
        np.testing.assert_array_equal(ours.router.bias.get_value(), bias)
        assert np.any(bias)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:capacity_factor=0.5 drops")
def test_evaluation_changes_nothing():
    _, _, ours = both(**OPTIONS)
    ours.eval()
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(ours)))
    ours(X)
    assert_same(nnx.to_pure_dict(nnx.state(ours)), before)
    ours.train()
    ours(X)
    assert np.any(ours.router.bias.get_value())


@pytest.mark.slow
def test_losses_are_captured():
    linen, variables, ours = both()
    ours.eval()
    _, mutated = linen.apply(variables, X, mutable=["intermediates"])
    _, captured = nnx.capture(nnx.Intermediate)(lambda model, x: model(x))(ours, X)
    assert_same(nnx.to_pure_dict(captured), dict(mutated["intermediates"]))


def test_precision_of_experts_in_high_precision():
    layer = jfp8.nnx.ExpertDense(2, 8, 4, precision="highest", rngs=nnx.Rngs(0))
    with jfp8.autocast(enabled=False):
        assert "HIGHEST" in str(jax.make_jaxpr(layer)(jnp.ones((6, 8)), jnp.array([2, 4])))


def test_a_bias_that_cannot_be_kept_raises():
    model = jfp8.nnx.MoE(FEATURES, EXPERTS, HIDDEN, bias_update_rate=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="updates its bias in training.*\n?.*model.eval"):
        jax.eval_shape(model, X)
    with pytest.raises(ValueError, match="bias_update_rate=-1 must not be negative"):
        jfp8.nnx.MoE(FEATURES, EXPERTS, HIDDEN, bias_update_rate=-1, rngs=nnx.Rngs(0))
