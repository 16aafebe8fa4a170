"""States of products that a GPU stacks, against the same function of one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.kernels.cuda import Cuda
from jfp8.training import model_histories

X = jax.random.normal(jax.random.key(1), (4, 8))
FACTORS = (1.0, 3.0, jnp.nan, 0.5)


def in_linen():
    model = jfp8.LayerNormMLP(16, recipe="delayed")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.5))
    loss_fn = lambda variables, x: (jnp.sum(model.apply(variables, x) ** 2), {})

    @jax.jit
    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads), loss

    losses = []
    for factor in FACTORS:
        state, loss = step(state, factor * X)
        losses.append(loss)
    return state.fp8, state.params, losses


def in_nnx():
    model = jfp8.nnx.LayerNormMLP(8, 16, recipe="delayed", rngs=nnx.Rngs(0))
    optimizer = jfp8.nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jfp8.nnx.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2))(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, factor * X) for factor in FACTORS]
    return (*map(nnx.as_pure, nnx.state(model, jfp8.nnx.Fp8State, nnx.Param)), losses)


@pytest.mark.representative(1)
@pytest.mark.parametrize("trained", [in_linen, in_nnx])
def test_steps_have_the_same_bits(trained, monkeypatch):
    one_by_one = trained()
    monkeypatch.setattr(model_histories, "planner_of", Cuda)
    stacked = trained()
    jax.tree.map(np.testing.assert_array_equal, one_by_one, stacked)
    filled = [x for x in jax.tree.leaves(stacked[0]) if x.ndim and x.shape[-1] == 16]
    assert len(filled) == 6
    assert all((x > 0).sum() == 3 for x in filled)


def test_merged_arrays_keep_their_bits():
    bits = np.array([0, 1 << 31, 0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0x3F800000], np.uint32)
    given = bits.view(np.float32), bits.view(np.int32), bits, bits > 7, bits.view(jnp.bfloat16)
    for x, merged in zip(given, jax.jit(Cuda().merged)(given), strict=True):
        assert (merged.dtype, np.asarray(merged).tobytes()) == (x.dtype, x.tobytes())


def test_what_differs_is_not_stacked_and_at_most_eight_are():
    seen = []

    def double(x):
        seen.append(x.shape)
        return {"y": 2 * x, "n": jnp.zeros(x.shape[:-1])}

    shapes = [(3,), (2, 3), (3,), (5,), *9 * [(4,)]]
    arguments = [(jnp.full(shape, i + 1.0),) for i, shape in enumerate(shapes)]
    found = Cuda().over_stacked(double, arguments)
    assert sorted(seen) == [(2, 3), (2, 3), (4,), (5,), (8, 4)]
    for (x,), each in zip(arguments, found, strict=True):
        np.testing.assert_array_equal(each["y"], 2 * x)
        assert each["n"].shape == x.shape[:-1]
