"""Models of one function, and their training."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax

import jfp8


class Model(nn.Module):
    """A model whose call is `run`, a function of the module and of the inputs."""

    run: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs, **options):
        return self.run(self, *inputs, **options)


def trained(loss_fn, variables, batch, steps=1, lr=0.05) -> jfp8.TrainState:
    """Return the state after some steps of a loss of variables and a batch."""
    state = jfp8.TrainState.create(apply_fn=loss_fn, variables=variables, tx=optax.sgd(lr))

    @jax.jit
    def step(state):
        return state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, batch)[1])

    for _ in range(steps):
        state = step(state)
    return state
