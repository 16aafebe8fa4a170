"""A step is skipped if any gradient has an Inf or NaN, whatever the parameter is for."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.optim.loss_scale_state import find_loss_scale
from support.arrays import assert_same

TOKENS = jnp.arange(6) % 5


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.LayerNorm()(nn.Embed(5, 8)(tokens))
        return jfp8.Dense(4)(x) * self.param("foreign", nn.initializers.ones, (1, 4))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(5, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dense = jfp8.nnx.Linear(8, 4, rngs=rngs)
        self.foreign = nnx.Param(jnp.ones((1, 4)))

    def __call__(self, tokens):
        return self.dense(self.norm(self.embedding(tokens))) * self.foreign


LEAVES = {"embedding", "scale", "kernel", "bias", "foreign"}
TX = {
    "none": lambda: optax.adam(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "loss scale": lambda: optax.chain(jfp8.loss_scale(), optax.adam(0.1)),
}


def linen(tx):
    """A function of gradients: parameters after a step, the optimizer's state, and skipped steps.

    Then the parameters before it, and gradients.
    """
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
    gradient = jfp8.value_and_grad(lambda v, t: jnp.mean(model.apply(v, t) ** 2))
    _, found = jax.jit(gradient)(state, TOKENS)

    def step(params):
        new = state.apply_gradients(dataclasses.replace(found, params=params))
        return new.params, new.opt_state, new.skipped_steps

    return step, state.params, found.params


def of_nnx(tx):
    model = NnxModel(nnx.Rngs(0))
    optimizer = jfp8.nnx.Optimizer(model, tx)
    gradient = jfp8.nnx.value_and_grad(lambda m, t: jnp.mean(m(t) ** 2))
    _, grads = nnx.jit(gradient)(model, TOKENS)
    graph, before = nnx.split((model, optimizer))
    params = lambda model: nnx.as_pure(nnx.state(model, nnx.Param))

    def step(grads):
        model, optimizer = nnx.merge(graph, before, copy=True)
        scale = find_loss_scale(nnx.as_pure(optimizer.opt_state))
        factor = 1.0 if scale is None else scale.loss_scale
        optimizer.update(model, jax.tree.map(lambda g: g * factor, grads))
        return params(model), nnx.as_pure(optimizer.opt_state), optimizer.skipped_steps[...]

    return step, params(model), grads


@pytest.mark.parametrize("tx", TX)
@pytest.mark.parametrize("door", [linen, of_nnx])
def test_any_gradient_that_is_not_finite_skips_the_step(door, tx):
    """A step reads fewer bytes than this oracle, which looks at every element."""
    step, before, grads = door(TX[tx]())
    step = jax.jit(step)
    leaves, structure = jax.tree.flatten(grads)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(grads)]
    assert all(any(leaf in path for path in paths) for leaf in LEAVES)
    for i, bad in itertools.product(range(len(leaves)), (1.0, np.inf, -np.inf, np.nan, 2.0**63)):
        given = leaves[:i] + [leaves[i].at[(-1,) * leaves[i].ndim].set(bad)] + leaves[i + 1 :]
        params, opt_state, skipped = step(structure.unflatten(given))
        # Optimizers square a gradient in f32.
        finite = all(np.all(np.float64(g) ** 2 <= 2.0**124) for g in given)
        assert int(skipped) == (not finite), (paths[i], bad)
        if finite:
            assert any(map(np.any, map(np.not_equal, *map(jax.tree.leaves, (params, before)))))
        else:
            assert_same(params, before)
        if tx == "loss scale":
            assert float(find_loss_scale(opt_state).loss_scale) == 2.0 ** (15 - int(skipped))
