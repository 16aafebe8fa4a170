"""Calls that people write, and that ended in an error of another library or were silently wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same, normal

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
